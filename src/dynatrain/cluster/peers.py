"""What the agents of the other nodes say of themselves, and what follows for this one."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
    """

    number: int = 0
    state: Literal["running", "stopping", "failed", "done"] = "running"
    signal: int = 0
    reason: str = ""


class Peers:
    """The other agents of the run; none when there is one node.

    Args:
        board: to post on and read from.
        place: this agent's place.
        clock: seconds, monotonic.
    """

    def __init__(self, board: Board, place: Place, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._node = place.node
        self._clock = clock
        self._number = 0
        self._seen = {n: Status() for n in range(place.nodes) if n != place.node}
        self._changed = dict.fromkeys(self._seen, clock())

    def say(
        self, state: Literal["running", "stopping", "failed", "done"], *, signal: int = 0, reason: str = ""
    ) -> None:
        """Tell the others how this agent is."""
        if self._seen:
            self._number += 1
            status = Status(number=self._number, state=state, signal=signal, reason=reason)
            self._board.post(f"agent/{self._node}", json.dumps(asdict(status)))

    def look(self) -> None:
        """Read what the others say."""
        for node, seen in self._seen.items():
            text = self._board.peek(f"agent/{node}")
            status = seen if text is None else Status(**json.loads(text))
            if status != seen:
                self._seen[node] = status
                self._changed[node] = self._clock()

    def stopping(self) -> tuple[int, int]:
        """``(node, signal)`` of an agent that was asked to end; ``(-1, 0)`` where none was."""
        return next(((n, s.signal) for n, s in self._seen.items() if s.state == "stopping"), (-1, 0))

    def failure(self, patience: float) -> str:
        """Why the run cannot go on, as far as the others are concerned; empty where it can.

        Args:
            patience: seconds of silence after which an agent counts as lost.
        """
        for node, status in self._seen.items():
            if status.state == "failed":
                return f"node {node} failed: {status.reason}"
            quiet = self._clock() - self._changed[node]
            if status.state != "done" and quiet > patience:
                return f"the agent of node {node} is silent for {quiet:.1f} s"
        return ""

    def any_done(self) -> bool:
        """Whether all ranks of some other node have ended well."""
        return any(status.state == "done" for status in self._seen.values())
