"""Who owns which box of which tensor under a layout.

An :class:`Ownership` is a layout plus, per tensor, a :class:`Placement`: which dims the layout's axes cut, and which
stages hold the tensor. It is either *computed* from a catalogue's declarations (:func:`declared`) or *read* from live
modules (``dynatrain.train``); both give the same type, and a test holds them equal.

The box of a rank is the whole tensor, cut per ``(axis, dim)`` in order - tp first, fsdp last - with torch's ceil-sized
chunks. DTensor's own offset arithmetic is wrong for uneven nested cuts, so it is never asked.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dynatrain.layout.layout import Layout
from dynatrain.layout.stages import stage_ranges
from dynatrain.space.box import Box, chunk, whole
from dynatrain.space.tensor import FIRST, Catalogue, State, Tensor


@dataclass(frozen=True, slots=True)
class Placement:
    """How one tensor lies under one layout.

    Attributes:
        cuts: ``(axis, dim)`` in cutting order; axes of size 1 are left out.
        stages: pp indices of the stages that hold it, ascending.
    """

    cuts: tuple[tuple[str, int], ...]
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ownership:
    """All boxes of all ranks, as a rule.

    Attributes:
        layout: sizes, rank order.
        placements: by tensor name. A tensor that is absent is owned by nobody in this layout.
    """

    layout: Layout
    placements: Mapping[str, Placement]

    def placed(self, tensor: Tensor, state: State | None = None) -> Placement:
        """How a state of ``tensor`` lies, by the state's own dims; the tensor itself where no state is named."""
        placement = self.placements[tensor.name]
        if state is None or state.like_tensor:
            return placement
        return Placement(state.cuts(placement.cuts, len(tensor.shape)), placement.stages)

    def state_box(self, tensor: Tensor, state: State, rank: int) -> Box | None:
        """As :meth:`box`, of one of its states. A rank whose piece of the tensor is empty may hold elements of it."""
        box = self.box(tensor, rank)
        return None if box is None else state.box(box, tensor.shape)

    def box(self, tensor: Tensor, rank: int) -> Box | None:
        """The box of ``tensor`` that ``rank`` owns: possibly empty, None where another stage holds the tensor."""
        placement = self.placements[tensor.name]
        at = self.layout.coordinates(rank)
        if at.pp not in placement.stages:
            return None
        box = list(whole(tensor.shape))
        for axis, dim in placement.cuts:
            box[dim] = chunk(*box[dim], self.layout.size(axis), at.along(axis))
        return tuple(box)

    def copies(self, tensor: Tensor, state: State | None = None) -> int:
        """How many ranks own each element of ``tensor``, or of one of its states."""
        placement = self.placed(tensor, state)
        cut = math.prod(self.layout.size(axis) for axis, _ in placement.cuts)
        return self.layout.world_size // self.layout.size("pp") // cut * len(placement.stages)

    def copy_index(self, tensor: Tensor, rank: int, state: State | None = None) -> int:
        """Which of the ``copies`` the piece of ``rank`` belongs to, in 0 .. copies - 1.

        The ranks of one index together hold each element exactly once.
        """
        placement = self.placed(tensor, state)
        at = self.layout.coordinates(rank)
        index = placement.stages.index(at.pp)
        cut = {axis for axis, _ in placement.cuts}
        for axis in ("dp", "fsdp", "tp"):
            if axis not in cut:
                index = index * self.layout.size(axis) + at.along(axis)
        return index


def declared(catalogue: Catalogue, layout: Layout, num_layers: int) -> Ownership:
    """The ownership that a catalogue's declared cuts and anchors give under ``layout``. Needs no model and no torch."""
    stages = stage_ranges(layout, num_layers)
    last = len(stages) - 1
    of_layer = {layer: stage for stage, layers in enumerate(stages) for layer in layers}

    def stage(anchor: int | str) -> int:
        if isinstance(anchor, int):
            return of_layer[anchor]
        return 0 if anchor == FIRST else last

    return Ownership(
        layout=layout,
        placements={
            tensor.name: Placement(
                cuts=tuple((axis, dim) for axis, dim in tensor.cuts if layout.size(axis) > 1),
                stages=tuple(sorted({stage(anchor) for anchor in tensor.anchors})),
            )
            for tensor in catalogue
        },
    )
