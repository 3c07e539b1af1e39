"""What a publish goes by: its plan, as one rank needs it, and what is kept of an engine between two publishes."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dynatrain.judge.judge import judge_all
from dynatrain.judge.publish import judge_deliveries
from dynatrain.plan.plan import Delivery
from dynatrain.plan.publish import Key, Publication, copies, predicted_bytes
from dynatrain.train.agreement import SwitchAbortedError


@dataclass(slots=True)
class Held:
    """Bytes on the host for publishes to one engine. Any thread may count."""

    now: int = 0
    peak: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, nbytes: int) -> None:
        """Count more, or fewer."""
        with self._lock:
            self.now += nbytes
            self.peak = max(self.peak, self.now)


Copies = dict[Key, torch.Tensor]
"""Of what this rank sends, each box once: in the engine's dtype and way round."""


def nbytes_of(copies: Copies) -> int:
    """Bytes of them all."""
    return sum(copy.nbytes for copy in copies.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What an engine was given last, kept so that the next publish can send what has changed since.

    Attributes:
        version: of it.
        copies: as they were sent.
    """

    version: int
    copies: Copies

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return nbytes_of(self.copies)

    def fits(self, wanted: Mapping[Key, Any]) -> bool:
        """Whether it has every box that is to be sent now; in another layout of the run, boxes are others."""
        return self.copies.keys() == wanted.keys()


class Drawn:
    """A plan to an engine, as one rank needs it. The same for every publish from one layout.

    Args:
        publication: the plan.
        rank: whose part.

    Attributes:
        publication: likewise.
        rounds: what this rank sends, by round and by rank of the engine.
        copies: what it copies for that.
        senders: for each round, who sends to each rank of the engine; on rank 0 alone, where the plan is judged.
    """

    def __init__(self, publication: Publication, rank: int) -> None:
        self.publication = publication
        self._deliveries = publication.deliveries(publication.part(rank).sends)
        self.rounds = publication.rounds(self._deliveries)
        self.copies = copies(self._deliveries)
        self.senders: tuple[dict[int, list[int]], ...] = ()

    def predicted(self, *, changes: bool) -> int:
        """The most bytes that the rank will hold on the host."""
        return predicted_bytes(self._deliveries, self.rounds, changes=changes)

    def judge(self) -> None:
        """Have the whole plan judged, once.

        Raises:
            SwitchAbortedError: it may not be carried out.
        """
        if self.senders:
            return
        plan = self.publication
        parts = [plan.part(holder) for holder in range(plan.holders)]
        verdict = judge_all(plan.engine.catalogue, plan.old, plan.new, parts)
        arriving: dict[int, list[Delivery]] = {rank: [] for rank in plan.engine.ranks}
        senders: tuple[dict[int, list[int]], ...] = tuple({} for _ in self.rounds)
        for holder in range(plan.first):
            for number, of_round in enumerate(plan.rounds(plan.deliveries(parts[holder].sends))):
                for rank, its in of_round.items():
                    arriving[rank] += its
                    senders[number].setdefault(rank, []).append(holder)
        if problems := (*verdict.problems, *judge_deliveries(plan.engine, arriving)):
            raise SwitchAbortedError("; ".join(problems))
        self.senders = senders
