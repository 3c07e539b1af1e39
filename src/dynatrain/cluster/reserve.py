"""Spares: ranks that are kept ready, so that a change of members or a replacement need not wait for a process.

A spare is forked, has imported everything, sits in its place (with CUDA, its device) and beats, but is of no world. The
agent that leads writes on the run's board which there are to be; each agent forks those of its node that are new, and
ends those that are no longer named. A crossing takes spares before it has anybody forked.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

from dynatrain.cluster.board import Board
from dynatrain.cluster.heart import read_beat
from dynatrain.cluster.summons import Newcomer

_SPARES = "spares"
TRIES = 3
"""Spares that may end in a row before they are of use; then no more are started."""


def chosen(
    short: int, spares: Collection[Newcomer], free: Mapping[int, Sequence[int]], first: int
) -> tuple[Newcomer, ...]:
    """Who is started so that there are enough: on the nodes with the fewest spares, of equal ones the last.

    Args:
        short: how many are missing; fewer are started where places are.
        spares: that there are.
        free: free places of each node.
        first: number of the first one, as a member.
    """
    room = {node: list(slots) for node, slots in free.items()}
    found: list[Newcomer] = []
    while len(found) < short and any(room.values()):
        there = [one.node for one in (*spares, *found)]
        node = min((node for node in room if room[node]), key=lambda node: (there.count(node), -node))
        found.append(Newcomer(member=first + len(found), node=node, slot=room[node].pop(0)))
    return tuple(found)


def read_spares(board: Board) -> tuple[Newcomer, ...]:
    """Which spares there are to be."""
    text = board.peek(_SPARES)
    return tuple(Newcomer(**one) for one in json.loads(text)) if text else ()


class Reserve:
    """The spares of a run, as the agent that leads it keeps them.

    Args:
        board: the run's.
        wanted: how many there are to be.
    """

    def __init__(self, board: Board, wanted: int) -> None:
        self._board = board
        self._wanted = wanted
        self._spares: dict[int, Newcomer] = {}
        self._seen: set[int] = set()
        self._lost = 0

    @property
    def members(self) -> tuple[int, ...]:
        """All of them, ready or not."""
        return tuple(self._spares)

    def ready(self, nodes: Collection[int]) -> dict[int, list[int]]:
        """Those that have beaten, by node."""
        found: dict[int, list[int]] = {}
        for one in self._spares.values():
            if one.node in nodes and one.member in self._seen and read_beat(self._board, one.member).number:
                found.setdefault(one.node, []).append(one.member)
        return found

    def keep(
        self, living: Collection[int], nodes: Collection[int], free: Mapping[int, Sequence[int]], first: int
    ) -> tuple[Newcomer, ...]:
        """See that there are enough; gives those that are new.

        Args:
            living: members whose processes live.
            nodes: on which there may be spares.
            free: free places of each of them, spares' own not among them.
            first: number of the next member.
        """
        before = set(self._spares)
        self._seen.update(before & set(living))
        gone = [member for member in before & self._seen if member not in living]
        self._lost += len(gone)
        self._drop([*gone, *(one.member for one in self._spares.values() if one.node not in nodes)])
        short = self._wanted - len(self._spares) if self._lost < TRIES else 0
        new = chosen(short, self._spares.values(), free, first)
        self._spares |= {one.member: one for one in new}
        if before != set(self._spares):
            self._post()
        return new

    def call(self, members: Collection[int]) -> None:
        """Those among ``members`` that are spares have been called, and are none any more."""
        if taken := [member for member in members if member in self._spares]:
            self._lost = 0
            self._drop(taken)
            self._post()

    def _drop(self, members: Collection[int]) -> None:
        for member in members:
            self._spares.pop(member, None)

    def _post(self) -> None:
        self._board.post(_SPARES, json.dumps([asdict(one) for one in self._spares.values()]))
