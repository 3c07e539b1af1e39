"""This process as the agent that drives a run: that it took it, that it still has it, and what it puts away at its end.

No torch: a run is claimed before that is imported.
"""

import logging

from dynatrain.observe.address import Address
from dynatrain.observe.mark import MARK, AgentMark, Lease, MarkError
from dynatrain.observe.requests import Inbox
from dynatrain.observe.run import RunFolder

_LOG = logging.getLogger(__name__)

_BY_NUMBER = frozenset({"leave", "nodes"})
"""Arguments of requests that name ranks or nodes."""


class Tenure:
    """See the module's text. An agent that does not lead has an empty one.

    Args:
        run: the run's folder.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._mark: AgentMark | None = None
        self._lease: Lease | None = None

    def take(self, *, take_over: bool = False) -> int:
        """Claim the run, and turn down what was asked when no agent was there; the number of the attempt.

        Args:
            take_over: as in :meth:`~dynatrain.observe.run.RunFolder.claim`.

        Raises:
            RunError: as there.
        """
        self._hold(mark := self._run.claim(take_over=take_over))
        Inbox(self._run.requests).close("asked before this agent began; no agent was there to take it")
        return mark.attempt

    def succeed(self, attempt: int) -> bool:
        """Take the run over from the agent of ``attempt``, which is gone; False where another has been faster.

        What was asked of it goes on being asked, but for what names ranks and nodes by numbers that others have now.

        Raises:
            OSError: the folder cannot be written.
        """
        self.drop()
        mark = self._run.succeed(attempt)
        if mark is None:
            return False
        self._hold(mark)
        told = (
            "the agent that led was lost, and ranks and nodes have other numbers now; see dynatrain status, ask again"
        )
        Inbox(self._run.requests).turn_down(_BY_NUMBER, told)
        return True

    def say_where(self, host: str, port: int, secret: str) -> str:
        """Write down where agents of other machines may come; why that cannot be, or empty.

        Args:
            host: where the run's store listens.
            port: its port.
            secret: what proves that somebody belongs to the run.
        """
        attempt = self._mark.attempt if self._mark is not None else 0
        try:
            Address(host=host, port=port, secret=secret, attempt=attempt).write(self._run.path)
        except OSError as error:
            return f"{self._run.path} cannot be written ({error.strerror})"
        return ""

    def drop(self) -> None:
        """Lead no more; whoever has taken the run over says how it ends."""
        if self._lease is not None:
            self._lease.close()
        self._mark = self._lease = None

    @property
    def lost(self) -> str:
        """Which agent has taken the run over from this one; empty while none has."""
        return self._lease.lost if self._lease is not None else ""

    def look(self) -> str:
        """:attr:`lost`, as the folder says it at this moment."""
        return self._lease.look() if self._lease is not None else ""

    def close(self, code: int) -> None:
        """The run has ended with ``code``: say so, unless another has taken it over."""
        mark, lease = self._mark, self._lease
        self._mark = self._lease = None
        if mark is None or lease is None:
            return
        lease.close()
        if not lease.look():
            Address.forget(self._run.path)
            Inbox(self._run.requests).close(f"the run has ended with code {code}")
        try:
            self._run.release(mark, code)
        except (OSError, MarkError) as error:  # everybody sees that its process is gone
            _LOG.warning("%s does not say how the run has ended (code %d): %s", self._run.path / MARK, code, error)

    def _hold(self, mark: AgentMark) -> None:
        self._mark, self._lease = mark, Lease(self._run.path, mark)
