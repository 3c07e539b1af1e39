"""Digests of a whole ownership: every copy of every granule, added up over the ranks, then compared.

Each rank digests only its own pieces (:func:`digest_vector`); one all-reduce with SUM over the ranks turns the vectors
into the digests of all copies. Digests are kept per copy and per *cell*, the distinct boxes of the new ownership:
before a switch the old pieces are digested cell by cell, so that a difference names the rank that holds it without
looking at the old pieces again, which in ``tight`` mode are gone.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from dynatrain.execute.digest import MODULUS, digest_within
from dynatrain.execute.pieces import Piece
from dynatrain.plan.plan import Granule
from dynatrain.space.box import Box
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue, State, Tensor

ALGORITHM = "dynatrain-sum64"


@dataclass(frozen=True, slots=True)
class Difference:
    """A piece that does not hold what it should.

    Attributes:
        tensor: canonical name.
        state: name of the state.
        copy: which of the copies under the new ownership.
        rank: that holds it.
        box: of the piece.
    """

    tensor: str
    state: str
    copy: int
    rank: int
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestReport:
    """What comparing digests before and after a switch found.

    Attributes:
        equal: every copy after is the first copy before, and all copies before were equal.
        before: digest of each kind of state, as 16 hexadecimal digits.
        after: likewise; computed without sight of ``before``.
        groups: granules with more than one copy, before and after counted apart.
        checked: copies in them.
        unequal: ``(tensor, state, copy)`` of copies before the switch that differ from the first one.
        differing: pieces after the switch that differ from the first copy before.
    """

    equal: bool
    before: Mapping[str, str]
    after: Mapping[str, str]
    groups: int
    checked: int
    unequal: tuple[tuple[str, str, int], ...]
    differing: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class _Grid:
    """How an ownership holds one granule.

    Attributes:
        cells: distinct boxes that are not empty, ascending.
        holders: ``(copy, index in cells)`` by rank; ranks with an empty piece are absent.
    """

    cells: tuple[Box, ...]
    holders: Mapping[int, tuple[int, int]]

    @property
    def copies(self) -> int:
        return 1 + max((copy for copy, _ in self.holders.values()), default=0)


def digest_vector(
    pieces: Mapping[Granule, Piece],
    catalogue: Catalogue,
    ownership: Ownership,
    cut: Ownership,
    rank: int,
    go_on: Callable[[], None] = lambda: None,
    lost: Mapping[int, Mapping[Granule, Piece]] = MappingProxyType({}),
) -> torch.Tensor:
    """This rank's share: int64, to be added up over the ranks with wrap-around.

    Args:
        pieces: what the rank holds.
        catalogue: all tensors.
        ownership: under which it holds them.
        cut: whose cells the digests are kept for: the new ownership, before and after a switch.
        rank: this rank.
        go_on: called before each granule; what it raises ends the work.
        lost: pieces of ranks that are lost, for which this one answers: a copy's or a keeper's take their place.
    """
    found: list[int] = []
    for granule, grid, cells in _walk(catalogue, ownership, cut):
        go_on()
        slots = [0] * (grid.copies * len(cells))
        for holder, its in ((rank, pieces), *lost.items()):
            if holder in grid.holders and granule in its:
                piece, copy = its[granule], grid.holders[holder][0]
                for index, cell in enumerate(cells):
                    slots[copy * len(cells) + index] += digest_within(piece.tensor, piece.box, cell)
        found += [value % MODULUS for value in slots]
    return torch.tensor([value - MODULUS if value >= MODULUS // 2 else value for value in found], dtype=torch.int64)


def compare(
    before: torch.Tensor, after: torch.Tensor, catalogue: Catalogue, old: Ownership, new: Ownership
) -> DigestReport:
    """Judge two summed vectors.

    Args:
        before: sum of the ranks' ``digest_vector(..., old, cut=new)``.
        after: sum of the ranks' ``digest_vector(..., new, cut=new)``.
        catalogue: all tensors.
        old: ownership before.
        new: ownership after.
    """
    was, now = _tables(before, catalogue, old, new), _tables(after, catalogue, new, new)
    unequal, differing = _unequal(was, catalogue, new), []
    for (granule, grid, cells), old_copies, new_copies in zip(_walk(catalogue, new, new), was, now, strict=True):
        tensor = catalogue[granule[0]].name
        state = catalogue[granule[0]].states[granule[1]].name
        differing += [
            Difference(tensor, state, copy, rank, cells[cell])
            for rank, (copy, cell) in sorted(grid.holders.items())
            if new_copies[copy][cell] != old_copies[0][cell]
        ]
    groups = [copies for copies in (*was, *now) if len(copies) > 1]
    return DigestReport(
        equal=not unequal and not differing,
        before=_by_kind(was, catalogue, old, new),
        after=_by_kind(now, catalogue, new, new),
        groups=len(groups),
        checked=sum(len(copies) for copies in groups),
        unequal=unequal,
        differing=tuple(differing),
    )


def unequal_copies(
    before: torch.Tensor, catalogue: Catalogue, old: Ownership, new: Ownership
) -> tuple[tuple[str, str, int], ...]:
    """The ``(tensor, state, copy)`` of copies before a switch that differ from the first one; see :func:`compare`."""
    return _unequal(_tables(before, catalogue, old, new), catalogue, new)


def _unequal(tables: list[list[list[int]]], catalogue: Catalogue, cut: Ownership) -> tuple[tuple[str, str, int], ...]:
    return tuple(
        (catalogue[tensor].name, catalogue[tensor].states[state].name, copy)
        for ((tensor, state), _, _), copies in zip(_walk(catalogue, cut, cut), tables, strict=True)
        for copy, row in enumerate(copies)
        if row != copies[0]
    )


def boxes_of_copy(tensor: Tensor, state: State, ownership: Ownership, copy: int) -> dict[int, Box]:
    """The ranks whose pieces make up one copy of a granule, each with its box."""
    grid = _grid(tensor, state, ownership)
    return {rank: grid.cells[cell] for rank, (held, cell) in grid.holders.items() if held == copy}


def _walk(
    catalogue: Catalogue, ownership: Ownership, cut: Ownership
) -> Iterator[tuple[Granule, _Grid, tuple[Box, ...]]]:
    """Every granule that is owned, in catalogue order, with its grid and the cells that digests are kept for."""
    known: dict[object, _Grid] = {}

    def grid(tensor: Tensor, state: State, of: Ownership) -> _Grid:
        # Tensors of equal shape and placement, as in every layer, share one grid.
        key = (id(of), state.form, tensor.shape, of.placements[tensor.name])
        if key not in known:
            known[key] = _grid(tensor, state, of)
        return known[key]

    for index, tensor in enumerate(catalogue):
        for number, state in enumerate(tensor.states):
            yield (index, number), grid(tensor, state, ownership), grid(tensor, state, cut).cells


def _grid(tensor: Tensor, state: State, ownership: Ownership) -> _Grid:
    held = {rank: ownership.state_box(tensor, state, rank) for rank in ownership.layout.ranks}
    boxes = {rank: box for rank, box in held.items() if box is not None and all(start < stop for start, stop in box)}
    cells = tuple(sorted(set(boxes.values())))
    return _Grid(
        cells, {rank: (ownership.copy_index(tensor, rank, state), cells.index(box)) for rank, box in boxes.items()}
    )


def _tables(vector: torch.Tensor, catalogue: Catalogue, ownership: Ownership, cut: Ownership) -> list[list[list[int]]]:
    """The vector as digests by granule, copy, cell."""
    values = iter(vector.tolist())
    return [
        [[next(values) % MODULUS for _ in cells] for _ in range(grid.copies)]
        for _, grid, cells in _walk(catalogue, ownership, cut)
    ]


def _by_kind(
    tables: list[list[list[int]]], catalogue: Catalogue, ownership: Ownership, cut: Ownership
) -> dict[str, str]:
    """One digest per kind of state: over the digests of its granules in catalogue order, each distinct copy once."""
    found: dict[str, hashlib.blake2b] = {}
    for ((tensor, state), _, _), copies in zip(_walk(catalogue, ownership, cut), tables, strict=True):
        kind = found.setdefault(catalogue[tensor].states[state].name, hashlib.blake2b(digest_size=8))
        for value in sorted({sum(row) % MODULUS for row in copies}):
            kind.update(value.to_bytes(8, "little"))
        kind.update(b"/")
    return {name: digest.hexdigest() for name, digest in found.items()}
