"""Every new piece exactly once, every move out of a piece that its source holds and into one that its target needs."""

import itertools
from dataclasses import dataclass

import numpy as np

from dynatrain.judge.holdings import Flags, Holdings, Ints
from dynatrain.judge.verdict import Coverage, place, shown
from dynatrain.plan.table import MoveTable
from dynatrain.space.box import Box
from dynatrain.space.tensor import ITEMSIZE, Catalogue


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Boxes, one state a row: moves, or adopted pieces (with ``src == dst``)."""

    tensor: Ints
    state: Ints
    low: Ints
    high: Ints
    src: Ints
    dst: Ints

    def take(self, rows: Ints | Flags) -> "Rows":
        """Some of the rows."""
        return Rows(**{name: getattr(self, name)[rows] for name in self.__slots__})

    def joined(self, other: "Rows") -> "Rows":
        """These rows, then those of ``other``."""
        columns = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in self.__slots__}
        return Rows(**columns)

    def box(self, row: int | np.integer, catalogue: Catalogue) -> Box:
        """The box of one row."""
        tensor = catalogue[self.tensor[row]]
        dims = len(tensor.state_shape(tensor.states[self.state[row]]))
        return tuple((int(self.low[row, dim]), int(self.high[row, dim])) for dim in range(dims))


def by_state(moves: MoveTable, dims: int) -> Rows:
    """``moves``, one state a row, boxes widened to ``dims`` dims."""
    width = max((len(states) for states in moves.groups), default=0)
    states = np.full((len(moves.groups), width), -1, np.int64)
    for group, members in enumerate(moves.groups):
        states[group, : len(members)] = members
    row, column = np.nonzero(states[moves.group] >= 0)
    low, high = np.zeros((len(row), dims), np.int64), np.ones((len(row), dims), np.int64)
    low[:, : moves.low.shape[1]], high[:, : moves.high.shape[1]] = moves.low[row], moves.high[row]
    return Rows(
        tensor=moves.tensor[row],
        state=states[moves.group[row], column],
        low=low,
        high=high,
        src=moves.src[row],
        dst=moves.dst[row],
    )


def adopted_rows(new: Holdings, tensor: Ints, state: Ints, rank: Ints) -> Rows:
    """Adopted pieces as rows: the whole new piece."""
    kind = new.kinds(tensor, state)
    return Rows(tensor=tensor, state=state, low=new.low[kind, rank], high=new.high[kind, rank], src=rank, dst=rank)


def misplaced(catalogue: Catalogue, old: Holdings | None, new: Holdings, moves: Rows) -> tuple[str, ...]:
    """Moves that are empty, leave a piece that their source does not hold, or miss the piece of their target.

    Without ``old`` their sources are not asked: after a loss these are judged by what is left.
    """
    empty = (moves.low >= moves.high).any(axis=1)
    faults = [(empty, "is empty", moves.dst)]
    for side, rank, what in ((old, moves.src, "that the source holds"), (new, moves.dst, "that the target needs")):
        if side is not None:
            fits = inside(moves, side, side.kinds(moves.tensor, moves.state), rank)
            faults.append((~empty & ~fits, f"is not within the piece {what}", rank))
    return tuple(
        itertools.chain.from_iterable(
            shown(
                [
                    f"{place(catalogue[moves.tensor[i]], moves.state[i], moves.box(i, catalogue), int(rank[i]))} "
                    f"{what} (move from rank {moves.src[i]} to rank {moves.dst[i]})"
                    for i in np.flatnonzero(wrong)
                ],
                f"move(s) whose box {what}",
            )
            for wrong, what, rank in faults
        )
    )


def inside(rows: Rows, side: Holdings, kind: Ints, rank: Ints) -> Flags:
    """Which rows are within the piece that ``rank`` holds of ``kind``, each one a row."""
    fits = (rows.low >= side.low[kind, rank]) & (rows.high <= side.high[kind, rank])
    return np.asarray(fits.all(axis=1) & side.held[kind, rank])


def unadoptable(catalogue: Catalogue, old: Holdings, new: Holdings, adopted: Rows) -> tuple[str, ...]:
    """Adopted pieces that are not the same, non-empty box before and after."""
    kind = old.kinds(adopted.tensor, adopted.state)
    at = kind, adopted.dst
    equal = (adopted.low == old.low[at]).all(axis=1) & (adopted.high == old.high[at]).all(axis=1) & old.held[at]
    other = new.kinds(adopted.tensor, adopted.state)
    wrong = ~equal | (new.volume()[other, adopted.dst] == 0)
    return shown(
        [
            f"{place(catalogue[adopted.tensor[i]], adopted.state[i], adopted.box(i, catalogue), int(adopted.dst[i]))} "
            "is adopted, but the rank does not hold the same box before and after"
            for i in np.flatnonzero(wrong)
        ],
        "piece(s) adopted without being the same box",
    )


def coverage(
    catalogue: Catalogue, new: Holdings, written: Rows, ranks: Ints
) -> tuple[dict[str, Coverage], tuple[str, ...]]:
    """How often ``written`` brings each element of the new pieces of ``ranks``, by kind of state.

    Rows that are within their piece, disjoint, and add up to its volume cover it exactly once; only pieces for which
    that fails are looked at element by element.
    """
    width = max(len(tensor.states) for tensor in catalogue)
    world = new.held.shape[1]
    granules = [(index, at) for index, tensor in enumerate(catalogue) for at in range(len(tensor.states))]
    tensor, state = (np.array(column, np.int64) for column in zip(*granules, strict=True))
    expected = np.zeros((len(catalogue), width, world), np.int64)
    expected[tensor[:, None], state[:, None], ranks] = new.volume()[new.kinds(tensor, state)][:, ranks]
    counts = _Counts(expected=expected, written=np.zeros_like(expected))
    volumes = (written.high - written.low).clip(min=0).prod(axis=1)
    np.add.at(counts.written, (written.tensor, written.state, written.dst), volumes)
    key = np.ravel_multi_index((written.tensor, written.state, written.dst), expected.shape)
    kind = new.kinds(written.tensor, written.state)
    suspects = (counts.written != expected).ravel()
    suspects[key[~inside(written, new, kind, written.dst)]] = True
    suspects[key[overlapping(written, key)]] = True
    problems = _look_closely(catalogue, new, (written, key), np.flatnonzero(suspects), counts)
    return counts.by_kind(catalogue), shown(problems, "piece(s) not covered exactly once")


class _Counts:
    """Elements expected, written, written twice and missing, each (tensors, states, ranks)."""

    def __init__(self, *, expected: Ints, written: Ints) -> None:
        self.expected = expected
        self.written = written
        self.twice = np.zeros_like(expected)
        self.missing = np.zeros_like(expected)

    def by_kind(self, catalogue: Catalogue) -> dict[str, Coverage]:
        """The same in bytes, all tensors and ranks together, by name of the state."""
        sizes = {state.name: np.zeros(self.expected.shape[:2], np.int64) for t in catalogue for state in t.states}
        for index, tensor in enumerate(catalogue):
            for at, state in enumerate(tensor.states):
                sizes[state.name][index, at] = ITEMSIZE[state.dtype]
        expected, written, twice, missing = (
            column.sum(axis=2) for column in (self.expected, self.written, self.twice, self.missing)
        )
        return {
            name: Coverage(
                expected=int((expected * size).sum()),
                written=int((written * size).sum()),
                twice=int((twice * size).sum()),
                missing=int((missing * size).sum()),
            )
            for name, size in sorted(sizes.items())
        }


def overlapping(rows: Rows, key: Ints) -> Ints:
    """Rows that share an element with another row of the same piece (one of each pair)."""
    order = np.argsort(key, kind="stable")
    key, low, high = key[order], rows.low[order], rows.high[order]
    found = []
    for step in itertools.count(1):
        first = np.flatnonzero(key[step:] == key[:-step])
        if not first.size:
            break
        second = first + step
        common = np.maximum(low[first], low[second]) < np.minimum(high[first], high[second])
        found.append(second[common.all(axis=1)])
    return order[np.concatenate(found)] if found else np.zeros(0, np.int64)


def _look_closely(
    catalogue: Catalogue, new: Holdings, written: tuple[Rows, Ints], suspects: Ints, counts: _Counts
) -> list[str]:
    """Counts what is twice and missing in the pieces ``suspects``; ``written`` are rows and the piece of each."""
    rows, key = written
    order = np.argsort(key, kind="stable")
    first, last = (np.searchsorted(key[order], suspects, side) for side in ("left", "right"))
    problems = []
    for at, start, stop in zip(suspects, first, last, strict=True):
        tensor, state, rank = (int(i) for i in np.unravel_index(at, counts.expected.shape))
        kind = int(new.kinds(np.array([tensor]), np.array([state]))[0])
        low, high = new.low[kind, rank], new.high[kind, rank]
        if not new.held[kind, rank]:
            high = low
        twice, missing = occupancy(rows.take(order[start:stop]), low, high)
        counts.twice[tensor, state, rank], counts.missing[tensor, state, rank] = twice, missing
        dims = len(catalogue[tensor].state_shape(catalogue[tensor].states[state]))
        box = tuple((int(a), int(b)) for a, b in zip(low[:dims], high[:dims], strict=True))
        problems.append(
            f"{place(catalogue[tensor], state, box, rank)}: {missing} of {counts.expected[tensor, state, rank]} "
            f"elements missing, {twice} written twice, {counts.written[tensor, state, rank]} written in all"
        )
    return problems


def occupancy(rows: Rows, low: Ints, high: Ints) -> tuple[int, int]:
    """Elements that ``rows`` bring again (each repetition counts), and those of ``low:high`` that nothing brings."""
    starts, stops = np.vstack([low[None], rows.low]), np.vstack([high[None], rows.high])
    bounds = [np.unique(np.concatenate(column)) for column in zip(starts.T, stops.T, strict=True)]
    boxes = [
        tuple(slice(*np.searchsorted(bound, (a, b))) for bound, a, b in zip(bounds, start, stop, strict=True))
        for start, stop in zip(starts, stops, strict=True)
    ]
    times = np.zeros([len(bound) - 1 for bound in bounds], np.int64)
    for box in boxes[1:]:
        times[box] += 1
    volumes = np.ones((), np.int64)
    for bound in bounds:
        volumes = np.multiply.outer(volumes, np.diff(bound))
    return int((volumes * (times - 1).clip(min=0)).sum()), int((volumes * (times == 0))[boxes[0]].sum())
