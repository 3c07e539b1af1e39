"""An agent's own ranks: which live, which are halted, how each ended."""

import signal
from collections.abc import Iterable

from dynatrain.cluster.context import RankContext, Report
from dynatrain.cluster.rank import STACKS
from dynatrain.cluster.spawner import Spawner


class Ranks:
    """The ranks that this agent has forked.

    Args:
        spawner: the fork server.
        contexts: one for each rank.
    """

    def __init__(self, spawner: Spawner, contexts: Iterable[RankContext]) -> None:
        self._spawner = spawner
        self._contexts = {context.rank: context for context in contexts}
        self.pids: dict[int, int] = {}
        self.halted: set[int] = set()
        self.ends: dict[int, Report] = {}

    def fork(self) -> None:
        """Start all."""
        for context in self._contexts.values():
            self._spawner.fork(context)

    def note(self, report: Report) -> None:
        """Take in what the fork server says of one of them."""
        if report.kind == "forked":
            self.pids[report.rank] = report.pid
        elif report.kind == "stopped":
            self.halted.add(report.rank)
        elif report.kind == "continued":
            self.halted.discard(report.rank)
        elif report.kind == "ended":
            self.halted.discard(report.rank)
            self.ends[report.rank] = report

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks that have not ended."""
        return tuple(rank for rank in self._contexts if rank not in self.ends)

    @property
    def all_forked(self) -> bool:
        """Whether every rank has a process, or had one."""
        return len(self.pids) == len(self._contexts)

    def print_stacks(self) -> None:
        """Have every living rank print what it is at to its log."""
        for rank in self.living:
            self._spawner.signal(rank, STACKS)

    def kill(self) -> None:
        """Kill every living rank with its helpers."""
        for rank in self.living:
            self._spawner.signal(rank, signal.SIGKILL)
