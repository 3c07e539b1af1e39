"""An agent's own ranks, by their numbers in the run: which live, which are halted, how each ended."""

import signal
from collections.abc import Iterable

from dynatrain.cluster.context import RankContext, Report
from dynatrain.cluster.rank import STACKS
from dynatrain.cluster.spawner import Spawner


class Ranks:
    """The ranks that this agent has forked, ever.

    Args:
        spawner: the fork server.
    """

    def __init__(self, spawner: Spawner) -> None:
        self._spawner = spawner
        self._forked: list[int] = []
        self.slots: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        self.halted: set[int] = set()
        self.ends: dict[int, Report] = {}

    def fork(self, contexts: Iterable[RankContext]) -> None:
        """Start some."""
        for context in contexts:
            self._forked.append(context.member)
            self.slots[context.member] = context.local_rank
            self._spawner.fork(context)

    def note(self, report: Report) -> None:
        """Take in what the fork server says of one of them."""
        if report.kind == "forked":
            self.pids[report.member] = report.pid
        elif report.kind == "stopped":
            self.halted.add(report.member)
        elif report.kind == "continued":
            self.halted.discard(report.member)
        elif report.kind == "ended":
            self.halted.discard(report.member)
            self.ends[report.member] = report

    def __contains__(self, member: int) -> bool:
        """Whether this agent has forked it."""
        return member in self._forked

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks that have not ended."""
        return tuple(member for member in self._forked if member not in self.ends)

    @property
    def all_forked(self) -> bool:
        """Whether every rank has a process, or had one."""
        return len(self.pids) == len(self._forked)

    def print_stacks(self) -> None:
        """Have every living rank print what it is at to its log."""
        for member in self.living:
            self._spawner.signal(member, STACKS)

    def kill(self, members: Iterable[int]) -> None:
        """Kill ranks with their helpers; nothing where they have ended."""
        for member in members:
            self._spawner.signal(member, signal.SIGKILL)
