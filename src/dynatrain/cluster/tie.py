"""A second connection to the run's store, of an agent that does not host it: whether the store is still there.

torch waits for an answer of the store without an end: an agent whose store is halted, or on a machine without power,
would hang in it. So a thread watches beside: a plain connection to the same port, by which the kernel tells at once
that the store's process has ended, and within seconds that its machine does not answer; and how long ago the store
has answered anything. Where it is lost, the thread closes all connections of this process to it, and whoever waits in
one comes out with an error.
"""

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

from dynatrain.cluster.place import PlaceError

_LOOK_SECONDS = 0.2
_PROBES = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 3}  # seconds, seconds, times


class Tie:
    """See the module's text.

    Args:
        host: where the store listens.
        port: its port.
        patience: seconds without an answer after which it is taken for lost.

    Attributes:
        here: this machine's address, as it reaches the store.
        lost: what has become of the store; empty while it is there.

    Raises:
        PlaceError: nobody listens there.
    """

    def __init__(self, host: str, port: int, patience: float) -> None:
        try:
            self._socket = socket.create_connection((host, port), timeout=5.0)
        except OSError as error:
            raise PlaceError(f"The run's store at {host}:{port} cannot be reached: {error}.") from None
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PROBES.items():
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket.settimeout(_LOOK_SECONDS)
        self.here: str = self._socket.getsockname()[0]
        self._store = _plain(self._socket.getpeername())
        self._patience = patience
        self._unanswered = 0.0  # counted in looks: while this process is halted, nobody waits
        self._changed = threading.Event()
        self._over = False
        self.lost = ""
        self._thread = threading.Thread(target=self._watch, name="tie", daemon=True)
        self._thread.start()

    def answered(self) -> None:
        """The store has just answered something."""
        self._unanswered = 0.0

    def wait(self, seconds: float) -> str:
        """:attr:`lost`, waited for at most ``seconds``."""
        self._changed.wait(seconds)
        return self.lost

    def close(self) -> None:
        """Watch no more."""
        self._over = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)
        self._socket.close()

    def _watch(self) -> None:
        while not (self._over or self.lost):
            try:
                self.lost = "" if self._socket.recv(1) else "its connection was closed"
            except TimeoutError as silence:
                self.lost = self._silence() if silence.errno is None else "its machine does not answer"
            except OSError as error:
                self.lost = f"its connection was broken ({error.strerror})"
        if not self._over:
            _sever(self._store)
            self._changed.set()

    def _silence(self) -> str:
        self._unanswered += _LOOK_SECONDS
        silent = self._unanswered > self._patience
        return f"it has not answered for {self._patience:g} s" if silent else ""


def nobody_listens(host: str, port: int) -> bool:
    """Whether the kernel of that machine says that no process has the port: then the store's has ended."""
    try:
        socket.create_connection((host, port), timeout=0.5).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _sever(store: tuple[str, int]) -> None:
    """Close every connection of this process to ``store``, whoever waits in it."""
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile, or not connected
            if str(path.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6) and _plain(found.getpeername()) == store:
                        found.shutdown(socket.SHUT_RDWR)


def _plain(address: tuple[str, int]) -> tuple[str, int]:
    """Host and port, an IPv4 address as such also where the socket speaks IPv6."""
    return address[0].removeprefix("::ffff:"), address[1]
