"""The agent's side of its fork server. No torch: the server imports it while the agent does the same."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Self

from dynatrain.cluster.context import RankContext, Report

ROOM_SECONDS = 2.0
"""Time that the server has to take an order; it needs milliseconds."""
_LAUNCHER = ("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_")
_LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Spawner:
    """One fork server and the channel to it. Must be made and closed in the main thread.

    The main thread, because the kernel ties the server's life to the thread that starts it.

    Args:
        entry: what ranks run: see :func:`dynatrain.cluster.forkserver.load`.
        log: file for what the server prints.
    """

    def __init__(self, entry: str, log: Path) -> None:
        self.began = time.monotonic()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        self._taken: list[Report] = []
        self._over = False
        self._deaf = False
        descriptor = str(theirs.fileno())
        # -P: the folder that the user happens to be in must not hide modules; the agent's own path is handed over.
        command = [sys.executable, "-P", "-m", "dynatrain.cluster.forkserver", descriptor, entry, str(os.getpid())]
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment_below(),
            )

    @property
    def pid(self) -> int:
        """The server's process number."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when there is something to :meth:`receive`."""
        return self._channel.fileno()

    def fork(self, context: RankContext) -> None:
        """Start a rank."""
        self._order({"fork": asdict(context)})

    def signal(self, member: int, number: int) -> None:
        """Signal a rank and its helpers; nothing where it has ended."""
        self._order({"signal": number, "member": member})

    def receive(self) -> list[Report]:
        """What has come since the last call, oldest first.

        Raises:
            ConnectionError: the server is gone; its ranks are, too.
        """
        self._take()
        if self._over and not self._taken:
            raise ConnectionError("the fork server has ended")
        reports, self._taken = self._taken, []
        return reports

    def close(self, timeout: float) -> bool:
        """End the server and everything below it; False where something is left after ``timeout`` seconds."""
        self._channel.close()
        try:
            self._process.wait(timeout / 2)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)  # the kernel then kills its ranks
            try:
                self._process.wait(timeout / 2)
            except subprocess.TimeoutExpired:
                return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._channel.fileno() >= 0:
            self.close(timeout=3.0)

    def _take(self) -> None:
        """Read what the server has sent."""
        while not self._over:
            try:
                packet = self._channel.recv(1 << 16)
            except BlockingIOError:
                return
            if packet:
                self._taken.append(Report.from_json(packet.decode()))
            else:
                self._over = True

    def _order(self, order: dict[str, object]) -> None:
        """Send an order, as soon as there is room for it: the channel takes some 160 that nobody has read."""
        end = time.monotonic() + ROOM_SECONDS
        with suppress(BrokenPipeError, ConnectionResetError):  # the next receive says so
            while not self._deaf:
                try:
                    self._channel.send(json.dumps(order).encode())
                except BlockingIOError:
                    self._take()  # the server may be waiting for room itself
                    select.select([self._channel], [self._channel], [], 0.1)
                    self._deaf = time.monotonic() > end  # it is halted, and is not waited for again
                else:
                    return


def environment_below() -> dict[str, str]:
    """This process's environment without what would mislead ranks below it; one thread, and our own modules."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER) and k not in _LAUNCHER_NAMES}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**kept, **dict.fromkeys(_THREADS, "1"), "PYTHONPATH": path}
