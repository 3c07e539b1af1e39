"""The pieces that an ownership gives to every rank, as the judge reads them: box by box, by definition.

The builder finds pieces by dividing; here every rank's box is asked of the ownership itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

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
        roomy, plain = (np.where(self.held, rows.prod(axis=2), 0) for rows in (self.room, self.local))
        return np.where(pads[:, None], roomy[kind], plain[kind]) * size[:, None]


def holdings(catalogue: Catalogue, ownership: Ownership, ranks: int) -> Holdings:
    """The pieces of ranks 0 .. ``ranks`` - 1; those that the layout does not name hold nothing."""
    dims = max((len(tensor.shape) for tensor in catalogue), default=0)
    kinds: dict[tuple[object, ...], int] = {}
    pieces: list[tuple[Ints, Ints, Ints, Ints, Flags]] = []
    kind = np.zeros((len(catalogue), max(len(tensor.states) for tensor in catalogue)), np.int64)
    for index, tensor in enumerate(catalogue):
        placement = ownership.placements[tensor.name]
        for at, state in enumerate(tensor.states):
            key = (
                placement.stages,
                *(() if state.scalar else (tensor.shape, placement.cuts, placement.spans, placement.along, state.form)),
            )
            if key not in kinds:
                kinds[key] = len(kinds)
                pieces.append(_pieces(tensor, state, ownership, ranks, dims))
            kind[index, at] = kinds[key]
    low, high, local, room, held = (np.stack(part) for part in zip(*pieces, strict=True))
    return Holdings(kind=kind, low=low, high=high, local=local, room=room, held=held)


def _pieces(
    tensor: Tensor, state: State, ownership: Ownership, ranks: int, dims: int
) -> tuple[Ints, Ints, Ints, Ints, Flags]:
    """Low, high, local, room and held of one state of a tensor on all ranks."""
    shape = (ranks, dims)
    low, (high, local, room) = np.zeros(shape, np.int64), np.ones((3, *shape), np.int64)
    held = np.zeros(ranks, np.bool_)
    placement = ownership.placements[tensor.name]
    gathered = next((cut for cut in placement.cuts if cut[0] in GATHERED and not placement.spanned(cut[1])), None)
    uncut = replace(placement, cuts=tuple(cut for cut in placement.cuts if cut != gathered))
    group = Ownership(ownership.layout, {tensor.name: uncut})
    for rank in range(ranks):
        box, number = ownership.box(tensor, rank), ownership.layout.number(rank)
        if box is None or number is None:
            continue
        held[rank] = True
        for dim, (start, stop) in enumerate(state.box(box, tensor.shape)):
            low[rank, dim], high[rank, dim] = start, stop
            local[rank, dim] = room[rank, dim] = stop - start
        if not state.scalar and (span := placement.span(ownership.layout, number)):
            local[rank, state.dim(placement.along)], room[rank, state.dim(placement.along)] = span[2:]
        if gathered is not None and state.like_tensor:
            # An fsdp group gathers equal chunks: each is what its largest member needs.
            axis, dim = gathered
            rows = shape_of(group.box(tensor, rank) or ())[dim]
            room[rank, dim] = math.ceil(rows / ownership.layout.ways(axis))
    return low, high, local, room, held
