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
        phase: what the rank is at: ``start``, ``train``, a phase of a switch, ``end``.
        switch: number of the switch it is in; 0 for none.
    """

    number: int = 0
    step: int = 0
    phase: str = "start"
    switch: int = 0

    def __str__(self) -> str:
        """As in ``phase move of switch 3, step 40``."""
        inside = f" of switch {self.switch}" if self.switch else ""
        return f"phase {self.phase}{inside}, step {self.step}"


class Heart:
    """A rank's heartbeat: a daemon thread, and a beat at once at every change of phase.

    Args:
        board: to post on.
        rank: whose heart.
    """

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self._key = f"beat/{rank}"
        self._lock = threading.Lock()
        self._now = Beat()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._post()
        self._thread.start()

    def at(self, *, step: int, phase: str, switch: int = 0) -> None:
        """Say what this rank is at.

        A change of phase or switch is posted before the call returns, so that the agent knows the phase in which a
        rank died, also when it died at the phase's first line; a change of step alone goes with the next beat.
        """
        with self._lock:
            before = self._now
            self._now = replace(before, step=step, phase=phase, switch=switch)
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
        ranks: whose beats.
        clock: seconds, monotonic.
    """

    def __init__(self, board: Board, ranks: Iterable[int], clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._clock = clock
        self._last = dict.fromkeys(ranks, Beat())
        self._changed = dict.fromkeys(self._last, clock())

    def restart(self) -> None:
        """Count silence from now: the ranks have only just begun."""
        self._changed = dict.fromkeys(self._last, self._clock())

    def look(self) -> None:
        """Read the newest beats."""
        for rank, last in self._last.items():
            text = self._board.peek(f"beat/{rank}")
            beat = last if text is None else Beat(**json.loads(text))
            if beat != last:
                self._last[rank] = beat
                self._changed[rank] = self._clock()

    def last(self, rank: int) -> Beat:
        """The newest beat of a rank; before its first, one in phase ``start``."""
        return self._last[rank]

    def silent(self, seconds: float) -> tuple[int, ...]:
        """The ranks without a new beat for longer than that, as of the last look."""
        now = self._clock()
        return tuple(rank for rank, changed in self._changed.items() if now - changed > seconds)
