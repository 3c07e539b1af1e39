"""What the agents of a run say of themselves, and what follows for this one."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Literal

from dynatrain.cluster.board import Board
from dynatrain.cluster.place import Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """What an agent says of itself, twice a second.

    Attributes:
        number: grows with every message.
        state: ``running``; ``stopping`` (asked to by ``signal``); ``leaving`` (its host was told to go); ``handing``
            (of the agent that leads: its host leaves, and the others go on when the ranks have stopped, saved);
            ``left`` (and it has gone, the run goes on); ``failed`` (``reason``); ``done``.
        signal: why it stops.
        reason: why it failed.
        code: how its ranks have ended.
        living: members whose processes live on its node.
        heard: the crossing and the stage that it has acted on (``Summons.mark``).
        lost: newcomers of its node that cannot take part, in words.
        fallen: ``(member, what has become of it)`` of members of the world that are gone from its node.
    """

    number: int = 0
    state: Literal["running", "stopping", "leaving", "handing", "left", "failed", "done"] = "running"
    signal: int = 0
    reason: str = ""
    code: int = 0
    living: tuple[int, ...] = ()
    heard: str = ""
    lost: str = ""
    fallen: tuple[tuple[int, str], ...] = ()


ROSTER = "roster"
"""Where on the run's board it stands which nodes have an agent of the run; before that, those that have met."""


class Peers:
    """The other agents of the run, none when there is one node, and what this one says to them.

    Args:
        board: to post on and read from.
        place: this agent's place.
        clock: seconds, monotonic.

    Attributes:
        said: what this agent has said last.
        released: whether this agent is no longer one of the run's, and is to end.
    """

    def __init__(self, board: Board, place: Place, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._node = place.node
        self._clock = clock
        self.said = Status()
        self._seen = {n: Status() for n in range(place.nodes) if n != place.node}
        self._changed = dict.fromkeys(self._seen, clock())
        self.released = False

    def say(self, status: Status) -> None:
        """Tell the others how this agent is; its number is set here."""
        self.said = replace(status, number=self.said.number + 1)
        if self._seen:
            self._board.post(f"agent/{self._node}", json.dumps(asdict(self.said)))

    @property
    def everyone(self) -> dict[int, Status]:
        """What all agents have said last, by node."""
        return {self._node: self.said, **self._seen}

    @property
    def nodes(self) -> tuple[int, ...]:
        """All nodes that have an agent of the run."""
        return tuple(sorted({self._node, *self._seen} if not self.released else self._seen))

    def enroll(self, nodes: Iterable[int]) -> None:
        """Say, as the agent that leads, which nodes have an agent of the run from here on."""
        self._board.post(ROSTER, json.dumps(sorted(nodes)))
        self._follow_roster()

    def look(self) -> None:
        """Read who they are, and what they say."""
        self._follow_roster()
        for node, seen in self._seen.items():
            status = self.status(node) or seen
            if status != seen:
                self._seen[node] = status
                self._changed[node] = self._clock()

    def status(self, node: int) -> Status | None:
        """What the agent of a node has said last, also of one that is no longer of the run; None for nothing."""
        text = self._board.peek(f"agent/{node}")
        return None if text is None else _read(text)

    def _follow_roster(self) -> None:
        text = self._board.peek(ROSTER)
        if text is None:
            return
        nodes = set(json.loads(text))
        self.released = self._node not in nodes
        for node in nodes - self._seen.keys() - {self._node}:
            self._seen[node], self._changed[node] = Status(), self._clock()
        for node in self._seen.keys() - nodes:
            del self._seen[node], self._changed[node]

    def stopping(self) -> tuple[int, int]:
        """``(node, signal)`` of an agent that was asked to end; ``(-1, 0)`` where none was."""
        return next(((n, s.signal) for n, s in self._seen.items() if s.state == "stopping"), (-1, 0))

    def failure(self, patience: float, *, survives: bool = False) -> str:
        """Why the run cannot go on, as far as the others are concerned; empty where it can.

        Args:
            patience: seconds of silence after which an agent counts as lost.
            survives: whether it goes on without a node, other than 0, whose agent is lost.
        """
        for node, status in self._seen.items():
            if status.state == "failed":
                return f"node {node} failed: {status.reason}"
        silent = self.silent(patience)
        return silent.get(0, "") if survives else next(iter(silent.values()), "")

    def silent(self, patience: float) -> dict[int, str]:
        """The nodes whose agents are silent for longer than ``patience`` seconds, and what to say of each."""
        quiet = {node: self._clock() - since for node, since in self._changed.items()}
        return {
            node: f"the agent of node {node} is silent for {seconds:.1f} s"
            for node, seconds in sorted(quiet.items())
            if self._seen[node].state not in {"done", "left"} and seconds > patience
        }

    def is_lost(self, node: int, patience: float) -> bool:
        """Whether another agent has gone by itself, or is silent for longer than ``patience`` seconds."""
        status = self._seen[node]
        return status.state == "left" or self._clock() - self._changed[node] > patience

    @property
    def staying(self) -> tuple[int, ...]:
        """The nodes whose hosts were not told to go."""
        going = {"leaving", "handing"}
        return tuple(node for node, status in sorted(self.everyone.items()) if status.state not in going)

    @property
    def handed_over(self) -> bool:
        """Whether the agent that leads has said that its host leaves, and the others go on."""
        return any(status.state == "handing" for status in self._seen.values())

    def any_done(self) -> bool:
        """Whether all ranks of some other node have ended well."""
        return any(status.state == "done" for status in self._seen.values())

    @property
    def code(self) -> int:
        """The exit code of the other nodes' ranks, where those have ended well."""
        return max((status.code for status in self._seen.values() if status.state == "done"), default=0)


def _read(text: str) -> Status:
    found = json.loads(text)
    fallen = tuple((member, why) for member, why in found.get("fallen", ()))
    return Status(**{**found, "living": tuple(found["living"]), "fallen": fallen})
