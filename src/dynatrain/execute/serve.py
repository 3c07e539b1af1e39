"""Messages that others fetch from a rank, each when it wants them: HTTP, at no more than a stated rate.

The address has a secret in it, made anew for each server, so that who has not been told cannot read weights.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_CHUNK = 1 << 18

Make = Callable[[int, int], AbstractContextManager[Sequence[memoryview]]]
"""The message of a round for a rank of the engine, which is held while it is being sent."""


class Pace:
    """Bytes of all who send, within a rate. Any thread may wait.

    Args:
        rate: bytes a second; 0 for no bound.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0
        self._lock = threading.Lock()

    def wait(self, nbytes: int) -> None:
        """Return when so many bytes more may be sent."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free)
            self._free = begin + nbytes / self._rate
        time.sleep(begin - now)


class MessageServer:
    """Serves the messages of one publish from one rank, until it is closed.

    Args:
        make: makes a message when it is asked for; what it raises is an answer 500.
        host: the address to listen at, by which the engine's ranks find this one.
        rate: bytes a second, of all messages together; 0 for no bound.
        settle_in: called by each of its threads first.

    Attributes:
        url: of the server, without the path of a message: ``url/ROUND/RANK``.
        sent: bytes that were sent so far.
    """

    def __init__(self, make: Make, host: str, rate: float, settle_in: Callable[[], None]) -> None:
        self._make = make
        self._settle_in = settle_in
        self._pace = Pace(rate)
        self._secret = secrets.token_urlsafe(16)
        self._lock = threading.Lock()
        self.sent = 0
        self._server = ThreadingHTTPServer((host, 0), _handler(self._answer))
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_port}/{self._secret}"
        self._thread = threading.Thread(target=self._run, name="messages", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve no more; who is being answered gets no end."""
        self._server.shutdown()
        self._server.server_close()

    def _run(self) -> None:
        self._settle_in()
        self._server.serve_forever(poll_interval=0.05)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        self._settle_in()
        _, secret, *place = request.path.split("/")
        if not secrets.compare_digest(secret.encode(), self._secret.encode()) or len(place) != len(("round", "rank")):
            request.send_error(404)
            return
        with ExitStack() as stack:
            try:
                stretches = stack.enter_context(self._make(int(place[0]), int(place[1])))
            except Exception as error:  # noqa: BLE001 - told to who asked
                request.send_error(500, type(error).__name__, str(error))
                return
            try:
                self._send(request, stretches)
            except OSError:  # who asked is gone, and whoever drives the engine hears of it there
                request.close_connection = True

    def _send(self, request: BaseHTTPRequestHandler, stretches: Sequence[memoryview]) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "application/octet-stream")
        request.send_header("Content-Length", str(sum(stretch.nbytes for stretch in stretches)))
        request.end_headers()
        for stretch in stretches:
            for start in range(0, stretch.nbytes, _CHUNK):
                chunk = stretch[start : start + _CHUNK]
                self._pace.wait(chunk.nbytes)
                with self._lock:  # before it is sent: who has the last byte may ask at once
                    self.sent += chunk.nbytes
                request.wfile.write(chunk)


def _handler(answer: Callable[[BaseHTTPRequestHandler], None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 60.0

        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: Any) -> None:
            """Nothing: a rank's output is its own."""

    return Handler
