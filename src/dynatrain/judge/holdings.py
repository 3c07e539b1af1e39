"""The pieces that an ownership gives to every rank, as the judge reads them: box by box, by definition.

The builder finds pieces by dividing; here boxes are asked of the ownership itself, one of each class of ranks that sit
alike along all axes that cut a tensor.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dynatrain.layout.layout import Layout
from dynatrain.space.box import shape_of
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import ITEMSIZE, Catalogue, State, Tensor

GATHERED = ("fsdp", "efsdp")
"""Axes along which ``fully_shard`` gathers equal chunks. The builder has a list of its own."""

Padded = Callable[[Tensor, State], bool]
"""Whether a state's storage is padded to the ceil-sized fsdp chunk."""

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def pads(_tensor: Tensor, state: State) -> bool:
    """What torch's ``fully_shard`` does: parameters are padded, what an optimizer keeps for them is not."""
    return state.name == "param"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holdings:
    """Boxes of all ranks under one ownership; tensors that lie alike share a *kind*.

    Attributes:
        kind: of each state of each tensor, (tensors, most states); 0 beyond a tensor's states.
        low: first index of the box along each dim, (kinds, ranks, dims); 0 for dims that the tensor lacks.
        high: one past the last, (kinds, ranks, dims); 1 for dims that the tensor lacks.
        local: rows of storage along each dim without FSDP's padding, (kinds, ranks, dims).
        room: rows of storage with that, (kinds, ranks, dims).
        held: whether the rank holds the piece, empty or not, (kinds, ranks).
    """

    kind: Ints
    low: Ints
    high: Ints
    local: Ints
    room: Ints
    held: Flags

    def kinds(self, tensor: Ints, state: Ints) -> Ints:
        """The kind of each ``(tensor, state)``."""
        return np.asarray(self.kind[tensor, state])

    def volume(self) -> Ints:
        """Elements of each piece, (kinds, ranks)."""
        return np.where(self.held, (self.high - self.low).prod(axis=2), 0)

    def storage(self, catalogue: Catalogue, granules: list[tuple[int, int]], padded: Padded) -> Ints:
        """Bytes of storage of each granule on each rank, (granules, ranks)."""
        tensor, state = (np.array(column, np.int64) for column in zip(*granules, strict=True))
        kind = self.kinds(tensor, state)
        pads = np.array([padded(catalogue[t], catalogue[t].states[s]) for t, s in granules])
        size = np.array([ITEMSIZE[catalogue[t].states[s].dtype] for t, s in granules], np.int64)
        roomy, plain = (self.stored(padded=way) for way in (True, False))
        return np.where(pads[:, None], roomy[kind], plain[kind]) * size[:, None]

    def stored(self, *, padded: bool) -> Ints:
        """Elements of storage of each piece, (kinds, ranks); where ``padded``, with FSDP's own padding."""
        return np.where(self.held, (self.room if padded else self.local).prod(axis=2), 0)


def holdings(catalogue: Catalogue, ownership: Ownership, ranks: int) -> Holdings:
    """The pieces of ranks 0 .. ``ranks`` - 1; those that the layout does not name hold nothing."""
    dims = max((len(tensor.shape) for tensor in catalogue), default=0)
    places = _Places(ownership.layout, ranks)
    kinds: dict[tuple[object, ...], int] = {}
    boxes: dict[tuple[object, ...], tuple[Ints, Ints, Ints, Ints]] = {}
    pieces: list[tuple[Ints, Ints, Ints, Ints, Flags]] = []
    kind = np.zeros((len(catalogue), max(len(tensor.states) for tensor in catalogue)), np.int64)
    for index, tensor in enumerate(catalogue):
        placement = ownership.placements[tensor.name]
        for at, state in enumerate(tensor.states):
            lies = () if state.scalar else (tensor.shape, placement.cuts, placement.spans, placement.along, state.form)
            key = placement.stages, lies
            if key not in kinds:
                kinds[key] = len(kinds)
                if lies not in boxes:
                    boxes[lies] = _boxes(tensor, state, ownership, places, dims)
                held = np.isin(places.index("pp"), placement.stages)
                here = held[:, None]
                low, high, local, room = boxes[lies]
                others = np.where(here, high, 1), np.where(here, local, 1), np.where(here, room, 1)
                pieces.append((np.where(here, low, 0), *others, held))
            kind[index, at] = kinds[key]
    low, high, local, room, held = (np.stack(part) for part in zip(*pieces, strict=True))
    return Holdings(kind=kind, low=low, high=high, local=local, room=room, held=held)


class _Places:
    """Where each of ranks 0 .. ``ranks`` - 1 sits along each axis, asked of the layout; -1 for others."""

    def __init__(self, layout: Layout, ranks: int) -> None:
        self.ranks = ranks
        self._layout = layout
        self._named = [rank for rank in layout.ranks if rank < ranks]
        self._found: dict[str, Ints] = {}

    def index(self, axis: str) -> Ints:
        """The index of each rank along ``axis``."""
        if axis not in self._found:
            found = self._found[axis] = np.full(self.ranks, -1, np.int64)
            found[self._named] = [self._layout.index(axis, rank) for rank in self._named]
        return self._found[axis]

    def alike(self, axes: Iterable[str]) -> tuple[Ints, Ints]:
        """A rank of each class of ranks that sit alike along ``axes``, and the class of each rank."""
        number = (self.index("pp") >= 0).astype(np.int64)
        for axis in axes:
            number = number * (self._layout.ways(axis) + 1) + self.index(axis) + 1
        _, first, where = np.unique(number, return_index=True, return_inverse=True)
        return first, where


def _boxes(
    tensor: Tensor, state: State, ownership: Ownership, places: _Places, dims: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Low, high, local and room of one state of a tensor on all ranks, as if every stage held it.

    Each class of ranks that sit alike along the axes that cut the tensor is asked once.
    """
    placement = replace(ownership.placements[tensor.name], stages=tuple(range(ownership.layout.size("pp"))))
    asked = Ownership(ownership.layout, {tensor.name: placement})
    gathered = next((cut for cut in placement.cuts if cut[0] in GATHERED and not placement.spanned(cut[1])), None)
    uncut = replace(placement, cuts=tuple(cut for cut in placement.cuts if cut != gathered))
    group = Ownership(ownership.layout, {tensor.name: uncut})
    ranks, where = places.alike(axis for axis, _ in placement.cuts)
    low, (high, local, room) = np.zeros((len(ranks), dims), np.int64), np.ones((3, len(ranks), dims), np.int64)
    for at, rank in enumerate(ranks.tolist()):
        box, number = asked.box(tensor, rank), ownership.layout.number(rank)
        if box is None or number is None:
            continue
        for dim, (start, stop) in enumerate(state.box(box, tensor.shape)):
            low[at, dim], high[at, dim] = start, stop
            local[at, dim] = room[at, dim] = stop - start
        if not state.scalar and (span := placement.span(ownership.layout, number)):
            local[at, state.dim(placement.along)], room[at, state.dim(placement.along)] = span[2:]
        if gathered is not None and state.like_tensor:
            # An fsdp group gathers equal chunks: each is what its largest member needs.
            axis, dim = gathered
            rows = shape_of(group.box(tensor, rank) or ())[dim]
            room[at, dim] = math.ceil(rows / ownership.layout.ways(axis))
    return low[where], high[where], local[where], room[where]
