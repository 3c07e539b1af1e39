"""The signals by which people and schedulers end an agent."""

import os
import select
import signal
import time
from types import FrameType
from typing import Protocol, Self

ENDING = (signal.SIGINT, signal.SIGTERM)
SAME_SECONDS = 1.0
"""Signals that come within it are one wish: a scheduler may signal all processes, and a launcher pass its own on."""


class Readable(Protocol):
    """Something that can be waited for."""

    def fileno(self) -> int:
        """Its descriptor."""
        ...


class Interrupted(Exception):  # noqa: N818 - not an error: somebody asked
    """The agent was asked to end before its ranks were there."""


class Interrupts:
    """Records SIGINT and SIGTERM while it is open; a context manager for the main thread of a process that then ends.

    Recorded and not raised: an exception in the midst of anything would leave ranks behind.

    Attributes:
        received: the first signal; and, where that was asked for once more, the next.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._first = 0.0
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def wait(self, timeout: float, *others: Readable) -> None:
        """Sleep until a signal comes, one of ``others`` is readable, or ``timeout`` seconds have passed."""
        ready, _, _ = select.select([self._wake, *others], [], [], timeout)
        if self._wake in ready:
            os.read(self._wake, 4096)

    @staticmethod
    def sleep(timeout: float, *others: Readable) -> None:
        """As :meth:`wait`, but for what must be ended whatever signals come."""
        select.select(others, [], [], timeout)

    def check(self) -> None:
        """Raise if a signal has come.

        Raises:
            Interrupted: one has.
        """
        if self.received:
            raise Interrupted

    def pause(self, seconds: float) -> None:
        """Sleep, unless a signal has come or comes.

        Raises:
            Interrupted: one did.
        """
        self.check()
        self.wait(seconds)
        self.check()

    @property
    def exit_code(self) -> int:
        """The shell's code for the first signal: 130 or 143."""
        return 128 + self.received[0]

    def _record(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received:
            self._first = now
        if not self.received or now - self._first > SAME_SECONDS:
            self.received.append(number)

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._record) for number in ENDING}
        self._waker_before = signal.set_wakeup_fd(self._waker)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._waker_before)
        for number, handler in self._before.items():
            # A scheduler that says it once more, while the interpreter ends, is not to change the exit code.
            again = number == signal.SIGTERM and number in self.received
            signal.signal(number, signal.SIG_IGN if again else handler)
        os.close(self._wake)
        os.close(self._waker)
