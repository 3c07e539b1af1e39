"""What the agents of a run say of themselves, and what follows for this one."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Literal

from dynatrain.cluster.board import Board
from dynatrain.cluster.place import Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """What an agent says of itself, twice a second.

    Attributes:
        number: grows with every message.
        state: ``running``; ``stopping`` (asked to by ``signal``); ``failed`` (``reason``); ``done``.
        signal: why it stops.
        reason: why it failed.
        code: how its ranks have ended.
        living: members whose processes live on its node.
        heard: the crossing and the stage that it has acted on (``Summons.mark``).
        lost: newcomers of its node that cannot take part, in words.
        fallen: ``(member, what has become of it)`` of members of the world that are gone from its node.
    """

    number: int = 0
    state: Literal["running", "stopping", "failed", "done"] = "running"
    signal: int = 0
    reason: str = ""
    code: int = 0
    living: tuple[int, ...] = ()
    heard: str = ""
    lost: str = ""
    fallen: tuple[tuple[int, str], ...] = ()


class Peers:
    """The other agents of the run, none when there is one node, and what this one says to them.

    Args:
        board: to post on and read from.
        place: this agent's place.
        clock: seconds, monotonic.

    Attributes:
        said: what this agent has said last.
    """

    def __init__(self, board: Board, place: Place, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._node = place.node
        self._clock = clock
        self.said = Status()
        self._seen = {n: Status() for n in range(place.nodes) if n != place.node}
        self._changed = dict.fromkeys(self._seen, clock())
        self._given_up: set[int] = set()

    def say(self, status: Status) -> None:
        """Tell the others how this agent is; its number is set here."""
        self.said = replace(status, number=self.said.number + 1)
        if self._seen:
            self._board.post(f"agent/{self._node}", json.dumps(asdict(self.said)))

    @property
    def everyone(self) -> dict[int, Status]:
        """What all agents have said last, by node, without those that were given up."""
        return {
            node: said for node, said in {self._node: self.said, **self._seen}.items() if node not in self._given_up
        }

    def look(self) -> None:
        """Read what the others say."""
        for node, seen in self._seen.items():
            text = self._board.peek(f"agent/{node}")
            status = seen if text is None else _read(text)
            if status != seen:
                self._seen[node] = status
                self._changed[node] = self._clock()

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
            if status.state == "failed" and node not in self._given_up:
                return f"node {node} failed: {status.reason}"
        silent = self.silent(patience)
        return silent.get(0, "") if survives else next(iter(silent.values()), "")

    def silent(self, patience: float) -> dict[int, str]:
        """The nodes whose agents are silent for longer than ``patience`` seconds, and what to say of each."""
        quiet = {node: self._clock() - self._changed[node] for node in self._seen.keys() - self._given_up}
        return {
            node: f"the agent of node {node} is silent for {seconds:.1f} s"
            for node, seconds in sorted(quiet.items())
            if self._seen[node].state != "done" and seconds > patience
        }

    def give_up(self, node: int) -> None:
        """The run goes on without that node, whatever its agent says from now on."""
        self._given_up.add(node)

    def any_done(self) -> bool:
        """Whether all ranks of some other node have ended well."""
        return any(status.state == "done" for status in self._seen.values())

    @property
    def code(self) -> int:
        """The exit code of the other nodes' ranks, where those have ended well."""
        return max((status.code for status in self._seen.values() if status.state == "done"), default=0)


def _read(text: str) -> Status:
    found = json.loads(text)
    fallen = tuple((member, why) for member, why in found["fallen"])
    return Status(**{**found, "living": tuple(found["living"]), "fallen": fallen})
