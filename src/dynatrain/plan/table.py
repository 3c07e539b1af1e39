"""The same format as columns: all moves of a whole plan, for worlds where a Python object per move is too many."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynatrain.plan.plan import Move, Schedule
from dynatrain.space.box import Box

Ints = npt.NDArray[np.int64]
"""A column, or rows, of 64-bit integers."""

ALL = slice(None)
"""All rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoveTable:
    """Moves as columns; row ``i`` is one :class:`~dynatrain.plan.plan.Move`.

    Attributes:
        tensor: index in the catalogue, one per row.
        group: index into ``groups``, one per row.
        low: first index of the box along each dim, (rows, dims); dims that a tensor lacks have 0.
        high: one past the last, (rows, dims); dims that a tensor lacks have 1.
        src: source holder, one per row.
        dst: target holder, one per row; equal to ``src`` for a relay.
        groups: the tuples of state indices that occur.
    """

    tensor: Ints
    group: Ints
    low: Ints
    high: Ints
    src: Ints
    dst: Ints
    groups: tuple[tuple[int, ...], ...]

    @property
    def volume(self) -> Ints:
        """Elements of each row's box."""
        return np.asarray((self.high - self.low).prod(axis=1), np.int64)

    def box(self, row: int, dims: int) -> Box:
        """The box of one row, for a tensor of ``dims`` dims."""
        return tuple((int(self.low[row, dim]), int(self.high[row, dim])) for dim in range(dims))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholePlan:
    """A plan of all ranks.

    Attributes:
        moves: all of them, relays too; every move once.
        adopted_tensor: index in the catalogue, one per adopted piece.
        adopted_group: index into ``moves.groups``, one per adopted piece.
        adopted_rank: the rank that adopts, one per adopted piece.
        schedule: the rounds.
    """

    moves: MoveTable
    adopted_tensor: Ints
    adopted_group: Ints
    adopted_rank: Ints
    schedule: Schedule


def table(moves: Iterable[Move]) -> MoveTable:
    """``moves`` as columns, in their order."""
    rows = list(moves)
    dims = max((len(move.box) for move in rows), default=0)
    groups: dict[tuple[int, ...], int] = {}
    group = [groups.setdefault(move.states, len(groups)) for move in rows]
    low = np.zeros((len(rows), dims), np.int64)
    high = np.ones((len(rows), dims), np.int64)
    for i, move in enumerate(rows):
        if move.box:
            low[i, : len(move.box)], high[i, : len(move.box)] = zip(*move.box, strict=True)
    return MoveTable(
        tensor=np.array([move.tensor for move in rows], np.int64),
        group=np.array(group, np.int64),
        low=low,
        high=high,
        src=np.array([move.src for move in rows], np.int64),
        dst=np.array([move.dst for move in rows], np.int64),
        groups=tuple(groups),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Members:
    """Tensors and states that lie alike before and after: the members of one family, by number.

    Attributes:
        tensor: index in the catalogue, one per member.
        states: indices of the states that travel in the same boxes, one tuple per member.
        adopts: whether an equal box may keep its storage, one per member.
    """

    tensor: Ints
    states: tuple[tuple[int, ...], ...]
    adopts: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FamilyPlan:
    """A plan of all ranks in which members of a family share their rows: small enough for many thousand ranks.

    A row is one box that ``dst`` needs out of one old piece, for every member of the family. Who sends it differs from
    member to member by whose turn it is: of member ``n``, ``sources[first + (n + turn) % ways]``.

    Attributes:
        members: of each family.
        family: index into ``members``, one per row; ascending.
        low: first index of the box along each dim, (rows, dims); dims that a tensor lacks have 0.
        high: one past the last, (rows, dims); dims that a tensor lacks have 1.
        dst: target holder, one per row.
        first: first of the row's sources, one per row.
        ways: how many they are, one per row; those on the target's node alone where there are any.
        turn: whose turn it is for member 0, one per row.
        kept: whether the box is the target's whole piece before and after: adopted, or relaid where it may not be.
        sources: holders; rows share their stretches of it.
        holders_first: first of all that hold the row's old piece, in ``sources``, one per row.
        holders: how many they are, one per row.
        schedule: the rounds.
    """

    members: tuple[Members, ...]
    family: Ints
    low: Ints
    high: Ints
    dst: Ints
    first: Ints
    ways: Ints
    turn: Ints
    kept: npt.NDArray[np.bool_]
    sources: Ints
    holders_first: Ints
    holders: Ints
    schedule: Schedule

    def volume(self, rows: slice | Ints = ALL) -> Ints:
        """Elements of the box of each of ``rows``."""
        return np.asarray((self.high[rows] - self.low[rows]).prod(axis=1), np.int64)

    def rows(self, family: int) -> slice:
        """The rows of one family."""
        start, stop = np.searchsorted(self.family, [family, family + 1])
        return slice(int(start), int(stop))

    def source(self, rows: slice | Ints, number: Ints) -> Ints:
        """Who sends each of ``rows`` for each of the members ``number``, (rows, members)."""
        at = (number[None, :] + self.turn[rows][:, None]) % self.ways[rows][:, None]
        return np.asarray(self.sources[self.first[rows][:, None] + at], np.int64)
