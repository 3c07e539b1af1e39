"""Who owns which box of which tensor under a layout.

An :class:`Ownership` is a layout plus, per tensor, a :class:`Placement`: which dims the layout's axes cut, and which
stages hold the tensor. It is either *computed* from a catalogue's declarations (:func:`declared`) or *read* from live
modules (``dynatrain.train``); both give the same type, and a test holds them equal.

The box of a rank is the whole tensor, cut per ``(axis, dim)`` in order - tp (or ep, etp) first, fsdp (or efsdp) last -
with torch's ceil-sized chunks. DTensor's own offset arithmetic is wrong for uneven nested cuts, so it is never asked.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dynatrain.layout.layout import Layout, name_of
from dynatrain.layout.stages import stage_ranges, stage_ranks
from dynatrain.space.box import Box, chunk, whole
from dynatrain.space.tensor import FIRST, Catalogue, Cuts, State, Tensor

Span = tuple[int, int, int, int]
"""``(start, stop, local, room)``; see :class:`Placement`."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How one tensor lies under one layout.

    Attributes:
        cuts: ``(axis, dim)`` in cutting order, axes as :meth:`~dynatrain.layout.layout.Layout.digit` takes them; those
            of one way are left out.
        stages: indices along pp of the ranks that hold it, ascending.
        spans: where the rows of a part of a larger storage lie (a segment of a fused tensor, the real rows of a padded
            one), which is cut as a whole: for each index along the cuts of one dim, the first cut outermost, ``(start,
            stop, local, room)`` in rows of the tensor; ``local`` counts those that the padded vocabulary adds, too, and
            ``room`` also FSDP's own padding, which parameters alone have. Empty where each cut takes its ceil-sized
            chunk.
        along: the dim of the spans; the rows of a stack of matrices are its dim 1.
    """

    cuts: Cuts
    stages: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    along: int = 0

    def spanned(self, dim: int) -> bool:
        """Whether cuts of ``dim`` give spans instead of chunks."""
        return bool(self.spans) and dim == self.along

    def span(self, layout: Layout, number: int) -> Span | None:
        """The span of the rank of this number; None where cuts take chunks."""
        if not self.spans:
            return None
        at = 0
        for axis, dim in self.cuts:
            stride, ways = layout.digit(axis)
            at = at * ways + number // stride % ways if dim == self.along else at
        return self.spans[at]


@dataclass(frozen=True, slots=True)
class Ownership:
    """All boxes of all ranks, as a rule.

    Where it is one side of a crossing, ranks are holders, as :meth:`~dynatrain.layout.layout.Layout.over` numbers them.

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
        cuts, spans = state.cuts(placement.cuts, len(tensor.shape)), () if state.scalar else placement.spans
        return Placement(cuts, placement.stages, spans, state.dim(placement.along) if spans else 0)

    def state_box(self, tensor: Tensor, state: State, rank: int) -> Box | None:
        """As :meth:`box`, of one of its states. A rank whose piece of the tensor is empty may hold elements of it."""
        box = self.box(tensor, rank)
        return None if box is None else state.box(box, tensor.shape)

    def box(self, tensor: Tensor, rank: int) -> Box | None:
        """The box of ``tensor`` that ``rank`` owns: possibly empty; None where others hold the tensor.

        These are the ranks of its stages, and nobody else: a holder that the layout does not name has no box.
        """
        placement = self.placements[tensor.name]
        layout, number = self.layout, self.layout.number(rank)
        if number is None or number // layout.digit("pp")[0] not in placement.stages:
            return None
        box = list(whole(tensor.shape))
        for axis, dim in placement.cuts:
            stride, ways = layout.digit(axis)
            if not placement.spanned(dim):
                box[dim] = chunk(*box[dim], ways, number // stride % ways)
        if span := placement.span(layout, number):
            box[placement.along] = span[:2]
        return tuple(box)

    def copies(self, tensor: Tensor, state: State | None = None) -> int:
        """How many ranks own each element of ``tensor``, or of one of its states."""
        placement = self.placed(tensor, state)
        left_over = self.layout.left_over(axis for axis, _ in placement.cuts)
        return math.prod(ways for _, ways in left_over) * len(placement.stages)

    def copy_index(self, tensor: Tensor, rank: int, state: State | None = None) -> int:
        """Which of the ``copies`` the piece of ``rank``, which has one, belongs to, in 0 .. copies - 1.

        The ranks of one index together hold each element exactly once.
        """
        placement = self.placed(tensor, state)
        number = self.layout.number(rank)
        assert number is not None
        index = placement.stages.index(number // self.layout.digit("pp")[0])
        for stride, ways in self.layout.left_over(axis for axis, _ in placement.cuts):
            index = index * ways + number // stride % ways
        return index


def num_holders(*sides: Ownership) -> int:
    """One more than the largest rank, or holder, of any side: the size of whatever is counted by rank."""
    return max(side.layout.ranks[-1] for side in sides) + 1


def declared(catalogue: Catalogue, layout: Layout, num_layers: int) -> Ownership:
    """The ownership that a catalogue's declared cuts and anchors give under ``layout``. Needs no model and no torch.

    Expects a layout that is legal for the catalogue's model.
    """
    ranks = stage_ranks(layout)
    of_layer = {
        layer: rank for rank, layers in zip(ranks, stage_ranges(layout, num_layers), strict=True) for layer in layers
    }

    def stage(anchor: int | str) -> int:
        if isinstance(anchor, int):
            return of_layer[anchor]
        return ranks[0] if anchor == FIRST else ranks[-1]

    shared: dict[tuple[object, ...], Placement] = {}
    placements = {}
    for tensor in catalogue:
        stages = tuple(sorted({stage(anchor) for anchor in tensor.anchors}))
        key = tensor.shape, tensor.cuts, stages
        if key not in shared:
            shared[key] = Placement(cuts=cuts_under(layout, tensor), stages=stages)
        placements[tensor.name] = shared[key]
    return Ownership(layout=layout, placements=placements)


def cuts_under(layout: Layout, tensor: Tensor) -> Cuts:
    """The declared cuts of ``tensor`` as ``layout`` carries them out.

    A most number of ways that the axis does not exceed says nothing, and is dropped. Where a rank would hold fewer
    experts than efsdp has ways, efsdp cuts the first dim that nothing else cuts instead, if evenly (FSDP2 shards no
    other dim than the first unevenly), so that no rank stays idle.
    """
    found = []
    for axis, dim in tensor.cuts:
        stride, ways = layout.digit(axis)
        name = name_of(axis)
        plain = layout.digit(name) == (stride, ways)
        if ways > 1:
            found.append((name if plain else axis, _spare_dim(layout, tensor, dim) if name == "efsdp" else dim))
    return tuple(found)


def _spare_dim(layout: Layout, tensor: Tensor, dim: int) -> int:
    """The dim that efsdp cuts: ``dim``, which is that of the experts, or one to spare where they are too few."""
    ways = layout.ways("efsdp")
    experts = -(-tensor.shape[dim] // layout.ep)
    taken = {cut for _, cut in tensor.cuts}
    spare = next((at for at in range(len(tensor.shape)) if at not in taken), dim)
    return spare if experts < ways and tensor.shape[spare] % ways == 0 else dim
