"""How many bytes each rank's pieces take, per granule, as columns over all ranks."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynatrain.plan.build import Adoptable, always
from dynatrain.plan.mesh import Mesh
from dynatrain.plan.padding import GATHERED, Padded, fsdp_pads
from dynatrain.plan.table import Ints
from dynatrain.space.ownership import Ownership, Placement, num_holders
from dynatrain.space.tensor import ITEMSIZE, Catalogue


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """The pieces of one shape under one placement, a row per rank.

    Attributes:
        low: first index along each dim, (ranks, dims).
        high: one past the last, (ranks, dims).
        local: rows that storage has along each dim without FSDP's padding, (ranks, dims).
        room: rows that it has with that, (ranks, dims).
        held: whether the rank is in the world and in one of the tensor's stages.
    """

    low: Ints
    high: Ints
    local: Ints
    room: Ints
    held: npt.NDArray[np.bool_]

    def elements(self) -> Ints:
        """Elements per rank."""
        return np.where(self.held, (self.high - self.low).prod(axis=1), 0)

    def stored(self, *, padded: bool) -> Ints:
        """Elements of storage per rank: what a padded vocabulary adds is in it, and where ``padded``, FSDP's own."""
        return np.where(self.held, (self.room if padded else self.local).prod(axis=1), 0)


class PieceTable:
    """Pieces of ranks 0 .. ``ranks`` - 1 under one ownership, computed once per (shape, placement)."""

    def __init__(self, ownership: Ownership, ranks: int) -> None:
        self._layout = ownership.layout
        self._ranks = ranks
        numbers = Mesh(self._layout).numbers
        self._numbers = np.full(ranks, -1, np.int64)
        self._numbers[: len(numbers)] = numbers
        self._found: dict[tuple[tuple[int, ...], Placement], Pieces] = {}

    def pieces(self, shape: tuple[int, ...], placement: Placement) -> Pieces:
        """The pieces of a tensor of ``shape`` that lies as ``placement`` says."""
        key = shape, placement
        if key not in self._found:
            self._found[key] = self._pieces(shape, placement)
        return self._found[key]

    def _pieces(self, shape: tuple[int, ...], placement: Placement) -> Pieces:
        low = np.zeros((self._ranks, len(shape)), np.int64)
        high = np.broadcast_to(np.array(shape, np.int64), low.shape).copy()
        local, room = high.copy(), high.copy()
        at = np.zeros(self._ranks, np.int64)
        for axis, dim in placement.cuts:
            stride, ways = self._layout.digit(axis)
            if placement.spanned(dim):
                at = at * ways + self._numbers // stride % ways
                continue
            size = -(-(high[:, dim] - low[:, dim]) // ways)
            first = np.minimum(low[:, dim] + self._numbers // stride % ways * size, high[:, dim])
            low[:, dim], high[:, dim] = first, np.minimum(first + size, high[:, dim])
            local[:, dim] = high[:, dim] - first
            room[:, dim] = size if axis in GATHERED else local[:, dim]
        if placement.spans:
            for found, column in zip((low, high, local, room), np.array(placement.spans, np.int64)[at].T, strict=True):
                found[:, placement.along] = column
        held = np.isin(self._numbers // self._layout.digit("pp")[0], placement.stages)  # of nobody -1: in no stage
        return Pieces(low=low, high=high, local=local, room=room, held=held)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Storage:
    """What each granule takes and gives up on each rank, in bytes.

    Granules that lie alike share a *kind*, a column of bytes per rank.

    Attributes:
        granules: ``(tensor, state)`` of the whole catalogue, in catalogue order.
        kind: row of ``taken`` and ``freed``, one per granule.
        taken: storage that the new piece needs, 0 where it is adopted, (kinds, ranks).
        freed: storage that the old piece gives back, 0 where it is adopted, (kinds, ranks).
        adopted: storage that serves before and after, (kinds, ranks).
        bundle: place of the first granule that lies in the same storage, one per granule; its own where it is alone.
    """

    granules: tuple[tuple[int, int], ...]
    kind: Ints
    taken: Ints
    freed: Ints
    adopted: Ints
    bundle: Ints

    def members(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """The granules that lie in one storage, by the first of them."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for granule, first in zip(self.granules, self.bundle.tolist(), strict=True):
            found.setdefault(self.granules[first], []).append(granule)
        return found

    def joined(self) -> "Storage":
        """The same with each storage's granules as one, the first of them."""
        places = dict(zip(self.granules, range(len(self.granules)), strict=True))
        members = self.members()
        if len(members) == len(self.granules):
            return self
        kinds: dict[tuple[int, ...], int] = {}
        bundles = [tuple(sorted(int(self.kind[places[one]]) for one in of)) for of in members.values()]
        kind = np.array([kinds.setdefault(bundle, len(kinds)) for bundle in bundles])
        taken, freed, adopted = (
            np.stack([column[list(bundle)].sum(axis=0) for bundle in kinds])
            for column in (self.taken, self.freed, self.adopted)
        )
        first = np.arange(len(members))
        return Storage(granules=tuple(members), kind=kind, taken=taken, freed=freed, adopted=adopted, bundle=first)

    def total(self, column: Ints) -> Ints:
        """Bytes per rank of one of the columns, over all granules."""
        return np.asarray(np.bincount(self.kind, minlength=len(column)) @ column, np.int64)

    @property
    def old(self) -> Ints:
        """Bytes that each rank holds before."""
        return self.total(self.freed + self.adopted)

    @property
    def new(self) -> Ints:
        """Bytes that each rank holds after."""
        return self.total(self.taken + self.adopted)


def storage(
    catalogue: Catalogue,
    old: Ownership,
    new: Ownership,
    *,
    padded: Padded = fsdp_pads,
    adoptable: Adoptable = always,
) -> Storage:
    """The bytes of every granule on every rank of either world.

    Args:
        catalogue: the tensors; each has a placement before and after.
        old: the ownership that has the state.
        new: the ownership that needs it.
        padded: which states have padded storage.
        adoptable: the veto that the builder is given.
    """
    ranks = num_holders(old, new)
    before, after = PieceTable(old, ranks), PieceTable(new, ranks)
    kinds: dict[tuple[object, ...], int] = {}
    columns: list[tuple[Ints, Ints, Ints]] = []
    granules: list[tuple[int, int]] = []
    kind: list[int] = []
    bundle: list[int] = []
    first: dict[tuple[str, int], int] = {}
    for index, tensor in enumerate(catalogue):
        placements = old.placements[tensor.name], new.placements[tensor.name]
        may_adopt = adoptable(index)
        for at, state in enumerate(tensor.states):
            shape = tensor.state_shape(state)
            one, other = placements if state.like_tensor else (side.placed(tensor, state) for side in (old, new))
            key = shape, one, other, ITEMSIZE[state.dtype], padded(tensor, state), may_adopt
            if key not in kinds:
                kinds[key] = len(kinds)
                columns.append(_column(before.pieces(shape, one), after.pieces(shape, other), *key[3:]))
            bundle.append(first.setdefault((tensor.within or tensor.name, at), len(granules)))
            granules.append((index, at))
            kind.append(kinds[key])
    taken, freed, adopted = (np.stack(part) for part in zip(*columns, strict=True))
    return Storage(
        granules=tuple(granules),
        kind=np.array(kind),
        taken=taken,
        freed=freed,
        adopted=adopted,
        bundle=np.array(bundle, np.int64),
    )


def _column(old: Pieces, new: Pieces, itemsize: int, padded: bool, may_adopt: bool) -> tuple[Ints, Ints, Ints]:
    equal = (old.low == new.low).all(axis=1) & (old.high == new.high).all(axis=1) & old.held & new.held
    kept = equal & (new.elements() > 0) & may_adopt
    freed, taken = (itemsize * pieces.stored(padded=padded) for pieces in (old, new))
    return np.where(kept, 0, taken), np.where(kept, 0, freed), np.where(kept, freed, 0)


def alike(catalogue: Catalogue, old: Ownership, new: Ownership, *, padded: Padded = fsdp_pads) -> Adoptable:
    """The veto on adoption that padding asks for: equal boxes of a tensor must have equally many padded rows."""
    ranks = num_holders(old, new)
    before, after = PieceTable(old, ranks), PieceTable(new, ranks)

    found: dict[tuple[tuple[int, ...], Placement, Placement], bool] = {}

    def same(index: int) -> bool:
        tensor = catalogue[index]
        if not any(padded(tensor, state) for state in tensor.states):
            return True
        key = tensor.shape, old.placements[tensor.name], new.placements[tensor.name]
        if key not in found:
            one, other = before.pieces(*key[:2]), after.pieces(key[0], key[2])
            equal = (one.low == other.low).all(axis=1) & (one.high == other.high).all(axis=1) & one.held & other.held
            found[key] = bool(((one.room == other.room) & (one.local == other.local))[equal].all())
        return found[key]

    return same
