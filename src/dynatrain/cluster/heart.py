"""Heartbeats: a rank says that it lives and what it is at; its agent notices when it no longer does."""

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Self

from torch.distributed import DistError

from dynatrain.cluster.board import Board

BEAT_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """One sign of life.

    Attributes:
        number: counts the beats of a rank, so that two are never equal: clocks of two machines are not compared.
        step: the last step begun.
        phase: what the rank is at: ``start``, ``train``, a phase of a switch, ``parked``, ``end``.
        switch: number of the switch it is in; 0 for none.
        layout: of its world, as text; empty where it has not said it.
    """

    number: int = 0
    step: int = 0
    phase: str = "start"
    switch: int = 0
    layout: str = ""

    def __str__(self) -> str:
        """As in ``phase move of switch 3, step 40``."""
        inside = f" of switch {self.switch}" if self.switch else ""
        return f"phase {self.phase}{inside}, step {self.step}"


def beat_key(member: int) -> str:
    """Where on the run's board a rank beats."""
    return f"beat/{member}"


def read_beat(board: Board, member: int) -> Beat:
    """A rank's newest beat, whichever node it is on; before its first, one in phase ``start`` with number 0."""
    text = board.peek(beat_key(member))
    return Beat() if text is None else Beat(**json.loads(text))


class Heart:
    """A rank's heartbeat: a daemon thread, and a beat at once at every change of phase.

    Args:
        board: to post on.
        member: whose heart, by its number in the run.
    """

    def __init__(self, board: Board, member: int) -> None:
        self._board = board
        self._key = beat_key(member)
        self._lock = threading.Lock()
        self._now = Beat()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._post()
        self._thread.start()

    def at(self, *, step: int, phase: str, switch: int = 0, layout: str = "") -> None:
        """Say what this rank is at.

        A change of phase or switch is posted before the call returns, so that the agent knows the phase in which a
        rank died, also when it died at the phase's first line; a change of step alone goes with the next beat.
        """
        with self._lock:
            before = self._now
            self._now = replace(before, step=step, phase=phase, switch=switch, layout=layout)
        if (before.phase, before.switch) != (phase, switch):
            self._post()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _post(self) -> None:
        with self._lock:
            self._now = replace(self._now, number=self._now.number + 1)
            self._board.post(self._key, json.dumps(asdict(self._now)))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self._post()
            except DistError:
                return  # without the store there is no world: the main thread meets the same, the agent ends the rank

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Pulse:
    """The agent's view of the heartbeats of its ranks, timed by its own clock alone.

    Args:
        board: to read from.
        clock: seconds, monotonic.
    """

    def __init__(self, board: Board, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._clock = clock
        self._last: dict[int, Beat] = {}
        self._changed: dict[int, float] = {}

    def watch(self, members: Iterable[int]) -> None:
        """Look at these, too; their silence counts from now."""
        for member in members:
            self._last[member] = Beat()
            self._changed[member] = self._clock()

    def forget(self, members: Iterable[int]) -> None:
        """Look at these no more."""
        for member in members:
            self._last.pop(member, None)
            self._changed.pop(member, None)

    def look(self) -> None:
        """Read the newest beats."""
        for member, last in self._last.items():
            beat = read_beat(self._board, member)
            if beat != last:
                self._last[member] = beat
                self._changed[member] = self._clock()

    def last(self, member: int) -> Beat:
        """The newest beat of a rank; before its first, one in phase ``start``."""
        return self._last.get(member, Beat())

    def silent(self, seconds: float) -> tuple[int, ...]:
        """The ranks without a new beat for longer than that, as of the last look."""
        now = self._clock()
        return tuple(member for member, changed in self._changed.items() if now - changed > seconds)
