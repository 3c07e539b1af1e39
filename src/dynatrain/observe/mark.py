"""Which process drives a run: the mark in ``agent.json``, and the sign of life that keeps it valid.

On its own host an agent is looked at by its process number. From other hosts only files can be seen: an agent touches
``agent.lease`` every second (:class:`Lease`), and the mark of one that has not for :data:`LEASE_SECONDS` binds
nobody.
"""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from dynatrain.observe.atomic import write_atomically
from dynatrain.observe.fields import Rule, count, problems_of
from dynatrain.observe.objects import ObjectError, read_object
from dynatrain.observe.process import boot_id, start_of

MARK = "agent.json"
_TOUCHED = "agent.lease"
LEASE_SECONDS = 60.0
"""Silence of an agent on another host after which it is gone. Clocks of hosts have to agree better than that."""
TOUCH_SECONDS = 1.0

Liveness = Literal["alive", "ended", "gone", "elsewhere"]
"""An agent's process runs; has ended and said how; was killed, or has been silent for too long on another host; or has
lately given a sign of life there, where we cannot look."""


class MarkError(ValueError):
    """A mark that was damaged; the text says how, and what would do."""


def _exit_code(value: object) -> bool:
    return value is None or (count(value) and value in range(256))


_RULES: Rule = {
    "pid": count,
    "started": count,
    "boot": lambda value: isinstance(value, str),
    "host": lambda value: isinstance(value, str),
    "attempt": count,
    "exit": _exit_code,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentMark:
    """Which process drives a run: the content of ``agent.json``.

    Attributes:
        pid: the agent's process number.
        started: its start, in clock ticks since boot: a later process with the same number has another.
        boot: identity of the boot that both numbers belong to.
        host: where it runs.
        attempt: 0 for the first agent of the run, one more for each later one.
        exit: its exit code once it has ended; None before.
    """

    pid: int
    started: int
    boot: str
    host: str
    attempt: int
    exit: int | None = None

    @classmethod
    def mine(cls, attempt: int) -> Self:
        """The mark of this process."""
        pid = os.getpid()
        return cls(pid=pid, started=start_of(pid), boot=boot_id(), host=socket.gethostname(), attempt=attempt)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The mark in a run's folder; None where there is none.

        Raises:
            MarkError: it was damaged.
        """
        path = folder / MARK
        try:
            found = read_object(path)
        except FileNotFoundError:
            return None
        except ObjectError as error:
            raise MarkError(_damaged(str(error))) from None
        if problems := problems_of(MARK, found, _RULES):
            raise MarkError(_damaged(f"{path} cannot be used: {'; '.join(problems)}"))
        return cls(**found)

    def write(self, folder: Path) -> None:
        """Put the mark into a run's folder, in the place of the one before."""
        write_atomically(folder / MARK, json.dumps(asdict(self)) + "\n")

    def liveness(self, silence: float = 0.0) -> Liveness:
        """What has become of that process, as seen from here.

        Args:
            silence: seconds since its last sign of life (:func:`silence`).
        """
        if self.exit is not None:
            return "ended"
        if self.host != socket.gethostname():
            return "elsewhere" if silence < LEASE_SECONDS else "gone"
        if self.boot != boot_id() or start_of(self.pid) != self.started:
            return "gone"
        return "alive"


def silence(folder: Path) -> float:
    """Seconds since the agent of a run gave a sign of life, by this host's clock; 0 where it never had one."""
    signs = [path.stat().st_mtime for path in (folder / MARK, folder / _TOUCHED) if path.exists()]
    return max(0.0, time.time() - max(signs, default=time.time()))


def last_sign(folder: Path) -> int:
    """When the agent of a run has touched its lease last, in nanoseconds, by the disk's clock; 0 where it never has.

    The file is opened: a network disk then asks its server, and does not answer from what it remembers.
    """
    try:
        handle = os.open(folder / _TOUCHED, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        return os.fstat(handle).st_mtime_ns
    finally:
        os.close(handle)


class Lease:
    """Gives signs of life, in a thread, and sees whether another agent has put its mark in the place of ours.

    Args:
        folder: of the run.
        mark: of this process.
    """

    def __init__(self, folder: Path, mark: AgentMark) -> None:
        self._folder, self._mark = folder, mark
        self._lost = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str:
        """Which agent has taken the run over; empty while none has."""
        return self._lost

    def close(self) -> None:
        """Give no more signs."""
        self._over.set()
        self._thread.join(1.0)  # longer only where the disk hangs

    def look(self) -> str:
        """:attr:`lost`, as the folder says it at this moment: for whoever was halted, and is not any more."""
        with suppress(OSError, MarkError):  # a disk that is away for a while says nothing
            found = AgentMark.read(self._folder)
            if found is not None and found != self._mark:
                self._lost = f"process {found.pid} on {found.host} has taken the run over"
        return self._lost

    def _keep(self) -> None:
        while not self._over.wait(TOUCH_SECONDS):
            if self.look():
                return
            with suppress(OSError):  # where the disk is away for too long, the next agent finds us silent
                (self._folder / _TOUCHED).touch()


def _damaged(what: str) -> str:
    return f"{what}. Where no process drives the run any more, remove the file."
