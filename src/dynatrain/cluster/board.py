"""The board: where ranks and agents agree, over a store and without collectives.

A collective cannot carry a decision about a world that may be broken: it hangs with the rank that is missing. The board
needs only atomic single keys. Every question has a *topic*, used once. Ranks post votes; a decision is written by
``compare_set`` on an empty key, so that exactly one value ever wins and all follow it, whoever proposed it: the last
rank to vote, or a rank whose deadline has passed and which names those whose votes are missing. A rank that comes
late finds the decision and learns that it was too late.

**Where to switch.** Ranks reach a step edge at different times, and one rank may hear of a request an edge before
another. *Edge k* of a rank is the moment after its step k and before its step k + 1. The last rank to be ready, at its
own edge k, decides ``go = k + 1`` and only then begins its step k + 1. No rank can end its step k + 1 before every rank
has begun its own, because every training step couples all ranks (at least by the all-reduce of the gradient norm, whose
result each rank reads on the host before its step counts as ended). So no rank has passed edge k + 1 when the decision
is written, and every rank finds it there when it gets to edge k + 1: all act at the same edge, with one question to the
store at each edge and no barrier.

A topic's keys are deleted by the last rank that leaves it: nothing grows over hundreds of switches. The decisions of
*lasting* topics stand until somebody clears the board, for whoever looks later.
"""

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

_ABSENT = "\0"  # no text of ours has it
_POLL = (0.0005, 0.01)  # seconds between two looks: at first, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Go:
    """Where a switch begins, or that it does not.

    Attributes:
        edge: the step edge at which every rank acts; -1 for a switch that was given up.
        reason: why it was given up.
        late: ranks that were not ready at the deadline.
    """

    edge: int
    reason: str = ""
    late: tuple[int, ...] = ()


class Board:
    """One participant's view of the board. Safe to share between threads: no call waits inside the store.

    Args:
        store: of this run and generation alone (a ``PrefixStore`` with the run's nonce).
        world_size: number of voters.
        broken: says why no vote is waited for any more, because a voter is lost; empty while all are there.
        lasting: topics whose decision is not deleted by those who leave it.

    Attributes:
        world_size: likewise.
    """

    def __init__(
        self, store: Store, world_size: int, *, broken: Callable[[], str] = str, lasting: Collection[str] = ()
    ) -> None:
        self._store = store
        self._broken = broken
        self._lasting = lasting
        self.world_size = world_size

    @property
    def broken(self) -> str:
        """Why no vote is waited for any more; empty while all voters are there."""
        return self._broken()

    # Requests: written by the first node's agent alone.

    def publish(self, request: str) -> int:
        """Put up a request; its number counts from 0. Only one participant publishes."""
        number = self.news()
        self._store.set(f"request/{number}", request)
        self._store.add("news", 1)  # after its text: whoever counts it can read it
        return number

    def news(self) -> int:
        """How many requests have ever been put up: one round trip, for every step edge."""
        return int(self._store.add("news", 0))

    def read(self, number: int) -> str | None:
        """A request's text; None where it was answered and taken down."""
        return self.peek(f"request/{number}")

    def answer(self, number: int, answer: str) -> None:
        """Say what became of a request; the first answer stands."""
        self._store.compare_set(f"answer/{number}", "", answer)

    def take_answer(self, number: int) -> str | None:
        """The answer to a request, which is taken down with it; None while there is none. For the publisher."""
        answer = self.peek(f"answer/{number}")
        if answer is not None:
            for key in (f"request/{number}", f"answer/{number}"):
                self._store.delete_key(key)
        return answer

    # Votes and decisions.

    def vote(self, topic: str, rank: int, value: Any) -> bool:
        """Post a rank's one vote on a topic.

        Args:
            topic: the question; never used before.
            rank: who votes.
            value: anything that JSON can say.

        Returns:
            Whether all votes are in: true for exactly one rank, which must then :meth:`decide`.
        """
        self._store.append(f"{topic}/votes", json.dumps([rank, value]) + "\n")
        return int(self._store.add(f"{topic}/count", 1)) == self.world_size

    def votes(self, topic: str) -> dict[int, Any]:
        """The votes posted so far, by rank."""
        lines = self.peek(f"{topic}/votes") or ""
        return dict(json.loads(line) for line in lines.splitlines())

    def missing(self, topic: str) -> tuple[int, ...]:
        """The ranks that have not voted yet."""
        return tuple(sorted(set(range(self.world_size)) - self.votes(topic).keys()))

    def decide(self, topic: str, value: Any) -> Any:
        """Propose a decision; returns the one that stands, which may be another's."""
        return json.loads(self._store.compare_set(f"{topic}/decision", "", json.dumps(value)))

    def decided(self, topic: str) -> Any | None:
        """The decision, or None while there is none."""
        text = self.peek(f"{topic}/decision")
        return None if text is None else json.loads(text)

    def decision(self, topic: str, timeout: float) -> Any:
        """Wait for the decision; at the deadline propose ``{"abort": why, "late": ranks}`` and follow what stands.

        Where a voter is lost the deadline is at once.

        Args:
            topic: the question.
            timeout: seconds.
        """
        end = time.monotonic() + timeout
        pause, longest = _POLL
        while (found := self.decided(topic)) is None:
            if why := self._broken():
                return self.decide(topic, {"abort": why, "late": self.missing(topic)})
            if time.monotonic() >= end:
                return self.decide(topic, self._lateness(topic, timeout))
            time.sleep(pause)
            pause = min(pause * 1.5, longest)
        return found

    def leave(self, topic: str) -> None:
        """Say that this rank needs the topic no more, once for each rank; the last one deletes it."""
        if int(self._store.add(f"{topic}/left", 1)) == self.world_size:
            for key in ("votes", "count", "decision", "left"):
                if key != "decision" or topic not in self._lasting:
                    self._store.delete_key(f"{topic}/{key}")

    # The step edge.

    def ready(self, switch: int, rank: int, edge: int) -> None:
        """Say, at this rank's own edge, that it can begin a switch; the module's text has the argument.

        Args:
            switch: number of the switch.
            rank: who is ready.
            edge: the last step this rank has ended. It must not begin the next one before this call returns.
        """
        if self.vote(f"go/{switch}", rank, edge):
            self.decide(f"go/{switch}", {"edge": edge + 1})

    def go_edge(self, switch: int) -> Go | None:
        """Where the switch begins; None while that is open. Asked by every rank at every edge until it is known."""
        found = self.decided(f"go/{switch}")
        return None if found is None else _go(found)

    def give_up(self, switch: int, reason: str) -> Go:
        """Propose not to switch, because a rank cannot; returns what stands: the others may have been faster."""
        return _go(self.decide(f"go/{switch}", {"abort": reason}))

    def overdue(self, switch: int, waited: float) -> Go:
        """Propose not to switch, because ranks are not ready after ``waited`` seconds; returns what stands."""
        return _go(self.decide(f"go/{switch}", self._lateness(f"go/{switch}", waited)))

    def done_with(self, switch: int) -> None:
        """Say that this rank has read where the switch begins, once for each rank."""
        self.leave(f"go/{switch}")

    def starved(self, switch: int) -> tuple[int, str] | None:
        """The edge at which a switch that could begin, and has not, is given up, and why; None while there is none."""
        found = self.decided(f"starved/{switch}")
        return None if found is None else (found[0], found[1])

    def starve(self, switch: int, edge: int, reason: str) -> None:
        """Propose, at this rank's own edge, to wait one step more and no longer: the argument is that of ``go``."""
        self.decide(f"starved/{switch}", [edge + 1, reason])

    # Single keys, for heartbeats and agents.

    def post(self, key: str, text: str) -> None:
        """Write one key."""
        self._store.set(key, text)

    def peek(self, key: str) -> str | None:
        """Read one key without waiting; None where it is not there."""
        # A store's get waits for a missing key. Comparing with a text that no key has changes nothing and answers
        # that text for a missing key.
        found: str = self._store.compare_set(key, _ABSENT, _ABSENT).decode()
        return None if found == _ABSENT else found

    def _lateness(self, topic: str, waited: float) -> dict[str, Any]:
        # Where no vote is missing, the last voter did not come to decide: it was halted in between.
        late = self.missing(topic) or tuple(self.votes(topic))[-1:]
        return {"abort": f"late ranks {list(late)} after {waited:.3g} s", "late": late}


def _go(found: dict[str, Any]) -> Go:
    return Go(edge=found.get("edge", -1), reason=found.get("abort", ""), late=tuple(found.get("late", ())))
