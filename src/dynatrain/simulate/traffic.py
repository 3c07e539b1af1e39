"""What travels in each round: transfers between ranks, bytes and messages, and what ranks write in their own memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

import numpy as np

from dynatrain.plan.table import FamilyPlan, Ints
from dynatrain.space.tensor import ITEMSIZE, Catalogue

_MOST_TURNS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """What goes between ranks in one round, one ordered pair a row; ``src == dst`` stays, and is laid out anew.

    Attributes:
        src: who sends.
        dst: who receives.
        nbytes: bytes.
        pieces: boxes of one state that they are.
    """

    src: Ints
    dst: Ints
    nbytes: Ints
    pieces: Ints


def transfers(src: Ints, dst: Ints, nbytes: Ints, pieces: Ints | None = None) -> Transfers:
    """Moves, of which several may be of one pair, as transfers; ``pieces`` of each, or one."""
    most = int(max(src.max(initial=0), dst.max(initial=0))) + 1
    pairs, where = np.unique(src * most + dst, return_inverse=True)
    size, boxes = (
        np.bincount(where, column, len(pairs)).astype(np.int64)
        for column in (nbytes, np.ones_like(nbytes) if pieces is None else pieces)
    )
    return Transfers(pairs // most, pairs % most, size, boxes)


class Traffic:
    """The rounds of a plan as transfers. Rounds that carry the same are the same value, made once."""

    def __init__(self, catalogue: Catalogue, plan: FamilyPlan) -> None:
        self._catalogue = catalogue
        self._plan = plan
        self._place = {
            (tensor, state): (family, number)
            for family, of in enumerate(plan.members)
            for number, (tensor, states) in enumerate(zip(of.tensor.tolist(), of.states, strict=True))
            for state in states
        }
        self._turns = [self._repeats(family) for family in range(len(plan.members))]
        self._moves: dict[tuple[int, int, bool], tuple[Ints, Ints, Ints]] = {}
        self._rounds: dict[tuple[object, ...], Transfers] = {}

    def __iter__(self) -> Iterator[Transfers]:
        """The rounds, in order."""
        for granules in self._plan.schedule.rounds:
            weights: dict[tuple[int, int, bool], tuple[int, int]] = {}
            for granule in granules:
                (family, number), (tensor, state) = self._place[granule], granule
                adopts = bool(self._plan.members[family].adopts[number])
                key = family, number % self._turns[family], adopts
                size, pieces = weights.get(key, (0, 0))
                weights[key] = size + ITEMSIZE[self._catalogue[tensor].states[state].dtype], pieces + 1
            signature = tuple(sorted(weights.items()))
            if signature not in self._rounds:
                columns = [
                    (src, dst, elements * size, np.full_like(dst, pieces))
                    for key, (size, pieces) in signature
                    for src, dst, elements in [self._of(key)]
                ]
                self._rounds[signature] = transfers(*(np.concatenate(column) for column in zip(*columns, strict=True)))
            yield self._rounds[signature]

    def _repeats(self, family: int) -> int:
        """After how many members everybody's turn comes again."""
        found = 1
        for ways in np.unique(self._plan.ways[self._plan.rows(family)]).tolist():
            found = min(lcm(found, ways), _MOST_TURNS)
        return found

    def _of(self, key: tuple[int, int, bool]) -> tuple[Ints, Ints, Ints]:
        """Sources, targets and elements of the moves of one member."""
        if key not in self._moves:
            family, number, adopts = key
            rows = self._plan.rows(family)
            written = ~self._plan.kept[rows] if adopts else np.ones(rows.stop - rows.start, np.bool_)
            at = np.flatnonzero(written) + rows.start
            src = self._plan.source(at, np.array([number]))[:, 0]
            self._moves[key] = src, self._plan.dst[at], self._plan.volume(at)
        return self._moves[key]
