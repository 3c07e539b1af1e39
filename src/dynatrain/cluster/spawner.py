"""The agent's side of its fork server. No torch: the server imports it while the agent does the same."""

import json
import os
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

_LAUNCHER = ("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_")
_LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Spawner:
    """One fork server and the channel to it. Must be made and closed in the main thread.

    The main thread, because the kernel ties the server's life to the thread that starts it.

    Args:
        entry: ``package.module:function`` that ranks run.
        log: file for what the server prints.
    """

    def __init__(self, entry: str, log: Path) -> None:
        self.began = time.monotonic()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
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
                env=_environment(),
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
        reports: list[Report] = []
        while True:
            try:
                packet = self._channel.recv(1 << 16)
            except BlockingIOError:
                return reports
            if not packet:
                if reports:
                    return reports
                raise ConnectionError("the fork server has ended")
            reports.append(Report.from_json(packet.decode()))

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

    def _order(self, order: dict[str, object]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the next receive says so
            self._channel.send(json.dumps(order).encode())


def _environment() -> dict[str, str]:
    """The agent's environment without what would mislead ranks, and with what keeps the server at one thread."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER) and k not in _LAUNCHER_NAMES}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**kept, **dict.fromkeys(_THREADS, "1"), "PYTHONPATH": path}
