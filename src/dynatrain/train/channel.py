"""What one switch says to the other ranks and to whoever watches, under its number."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from dynatrain.execute.transport import Transport
from dynatrain.train.agreement import Objection, exchange
from dynatrain.train.groups import GroupPool
from dynatrain.train.party import Party


@dataclass(slots=True)
class Channel:
    """One rank's side of one switch.

    Attributes:
        party: the rank's means.
        number: of the switch.
        groups: process groups of the switch.
        topic: of its questions: what each begins with.
        seconds: how long each phase took on this rank.
    """

    party: Party
    number: int
    groups: GroupPool
    topic: str
    seconds: dict[str, float] = field(default_factory=dict)

    def ask(
        self, what: str, payload: Any, objection: Objection | None = None, seconds: float | None = None
    ) -> list[Any]:
        """Put a question of this switch, each once: all ranks' payloads, by rank.

        Args:
            what: the question.
            payload: this rank's answer.
            objection: why this rank cannot go on.
            seconds: how long to wait for the others; the party's deadline where it is None.

        Raises:
            SwitchAbortedError: a rank objected or was late.
        """
        party, wait = self.party, seconds or self.party.deadline
        told = exchange(party.board, self._topic(what), party.rank, payload=payload, objection=objection, timeout=wait)
        return told.in_order()

    def decided(self, what: str) -> bool:
        """Whether a question has its answer, from all or by an abort, this rank's word apart."""
        return self.party.board.decided(self._topic(what)) is not None

    def _topic(self, what: str) -> str:
        return f"{self.topic}/{what}"

    def at(self, event: str, number: int = -1) -> None:
        """Tell the hook where this rank is."""
        self.party.hook(event, number, self.number)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Measure a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = time.perf_counter() - began

    def group(self, purpose: str) -> dist.ProcessGroup:
        """The group of all ranks for one purpose; its operations end with the phase's deadline."""
        backend = "gloo" if purpose == "check" else ""
        return self.groups.get(purpose, self.party.everyone, backend=backend, timeout_seconds=self.party.deadline)

    def transport(self, purpose: str) -> Transport:
        """A new transport among all ranks."""
        return self.party.transport(self.group(purpose), self.party.everyone)
