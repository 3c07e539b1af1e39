"""How bytes get from rank to rank: the contract, and its fulfilment by a torch process group.

Contract of every transport: between :meth:`Transport.post` and the return of :meth:`Pending.wait` neither side writes
the posted tensors, or reads what arrives; a receive buffer holds its message only after ``wait``, or once ``wait`` has
said that it arrived. Messages between one
ordered pair of ranks match in the order in which they were posted. Nothing here uses a default process group.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

_UNUSED_TAG = 77
"""No message travels under this gloo tag, so that a receive posted with it can only run out of time."""

_TICK = timedelta(milliseconds=1)

_GRACE_SECONDS = 0.05
"""What is under way may take that long to arrive before this rank's connections are closed. Gloo tells nobody of a
send whose bytes find the connection closed just when the receiver has asked for them: it would wait out its time."""


@dataclass(frozen=True, slots=True)
class Message:
    """One transfer with one peer.

    Attributes:
        peer: the other rank, numbered as in the plan.
        tensor: read when sent, written when received; contiguous, unless :meth:`Transport.direct` says otherwise.
    """

    peer: int
    tensor: torch.Tensor


Arrived = Callable[[Message], None]
"""Told of a received message that is whole, while its bytes are likely to be in the cache."""


def untold(_message: Message) -> None:
    """Nobody wants to know what has arrived."""


class TransportError(RuntimeError):
    """Transfers failed or ran out of time.

    Attributes:
        peers: ranks with a transfer that was still outstanding, ascending. A peer may be in it for no fault of its own:
            it waited on the one that failed.
    """

    def __init__(self, peers: Sequence[int], reason: str) -> None:
        self.peers = tuple(sorted(set(peers)))
        named = ", ".join(map(str, self.peers))
        super().__init__(f"transfers with rank(s) {named} did not finish: {reason}")


class Pending(Protocol):
    """Posted transfers."""

    def wait(self, timeout_seconds: float, arrived: Arrived = untold) -> None:
        """Return when every posted transfer is done. Call it once.

        Args:
            timeout_seconds: for all together.
            arrived: called once with each posted receive, from inside, as early as it may be read.

        Raises:
            TransportError: a peer is gone, or the time is over. The transport is then of no further use.
        """


class Transport(Protocol):
    """Moves messages among the ranks of one switch."""

    @property
    def size(self) -> int:
        """Number of ranks that it joins; equal on all of them."""

    @property
    def name(self) -> str:
        """What it is called in records."""

    def direct(self, peer: int) -> bool:
        """Whether messages from and to ``peer`` go from place to place, whatever their strides; alike at both ends."""

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start transfers, receives first, without blocking.

        Raises:
            TransportError: a peer is known to be gone.
        """

    def close(self) -> None:
        """Give up: every rank that waits on this one, and every thread here that waits, gets its error at once."""


class GroupTransport:
    """A transport over a process group that the caller made, owns and uses for nothing else meanwhile.

    Args:
        group: gloo or NCCL, registered or raw (``ProcessGroupGloo``; NCCL must be registered).
        ranks: ``ranks[i]`` is the plan's number of the group's member ``i``.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._group = group
        self._index = {rank: index for index, rank in enumerate(ranks)}
        self._batched = group.name() == "nccl"
        self._arriving: set[dist.Work] = set()

    @property
    def size(self) -> int:
        """Number of ranks that it joins."""
        return len(self._index)

    @property
    def name(self) -> str:
        """The backend's."""
        return self._group.name()

    def direct(self, _peer: int) -> bool:
        """Messages go through buffers of the backend, and are contiguous."""
        return False

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start transfers; see :class:`Transport`."""
        if self._batched:
            return _Batch(self._post_batch(sends, receives), [m.peer for m in (*receives, *sends)], receives)
        works = []
        for start, messages in ((self._group.recv, receives), (self._group.send, sends)):
            for message in messages:
                try:
                    works.append((message.peer, start([message.tensor], self._index[message.peer], 0)))
                except RuntimeError as error:
                    raise TransportError([message.peer], _reason(error)) from error
                if len(works) <= len(receives):
                    self._arriving.add(works[-1][1])
        return _Works(works, self._arriving, receives)

    def close(self) -> None:
        """Tear the group's connections down; see :class:`Transport`. May be called again, and from any thread."""
        if not self._batched:
            _finished(self._arriving)
            self._arriving.clear()
        sever(self._group)

    def _post_batch(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[dist.Work]:
        """NCCL wants all transfers that must progress together in one batch."""
        operations = [
            dist.P2POp(kind, message.tensor, group=self._group, group_peer=self._index[message.peer])
            for kind, messages in ((dist.irecv, receives), (dist.isend, sends))
            for message in messages
        ]
        return dist.batch_isend_irecv(operations) if operations else []


def sever(group: dist.ProcessGroup) -> None:
    """Close all connections of a group, from any thread: who waits in one of its operations, here or elsewhere, raises.

    Gloo has no call that interrupts (``abort`` does not), but a receive that runs out of time closes every connection
    of its group, on which all ranks see "connection closed by peer" within milliseconds. NCCL's ``abort`` does it,
    has never been executed yet: it needs two devices. The group is of no further use.
    """
    if group.name() == "nccl":
        group.abort()
        return
    for index in range(group.size()):
        if index != group.rank():
            # Raises always: "timed out" is the wanted effect, "closed" means that this pair is down already.
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], index, _UNUSED_TAG).wait(_TICK)


class _Works:
    """Gloo: one work per message, receives first, waited for one by one."""

    def __init__(
        self, works: list[tuple[int, dist.Work]], arriving: set[dist.Work], receives: Sequence[Message]
    ) -> None:
        self._works = works
        self._arriving = arriving
        self._receives = receives

    def wait(self, timeout_seconds: float, arrived: Arrived = untold) -> None:
        deadline = time.monotonic() + timeout_seconds
        for place, (peer, work) in enumerate(self._works):
            try:
                work.wait(max(_TICK, timedelta(seconds=deadline - time.monotonic())))
            except RuntimeError as error:
                rest = self._works[place + 1 :]
                done = _finished([one for _, one in rest])
                self._arriving.difference_update(one for _, one in self._works)
                raise TransportError([peer, *(at for at, one in rest if one not in done)], _reason(error)) from error
            self._arriving.discard(work)
            if place < len(self._receives):
                arrived(self._receives[place])


class _Batch:
    """NCCL: works complete on the device, so they are polled; ``wait`` alone would only order streams."""

    def __init__(self, works: list[dist.Work], peers: list[int], receives: Sequence[Message]) -> None:
        self._works = works
        self._peers = peers
        self._receives = receives

    def wait(self, timeout_seconds: float, arrived: Arrived = untold) -> None:
        deadline = time.monotonic() + timeout_seconds
        for work in self._works:
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise TransportError(self._peers, f"no answer within {timeout_seconds:g} s")
                time.sleep(0.0002)
            try:
                work.wait()
            except RuntimeError as error:
                raise TransportError(self._peers, _reason(error)) from error
        for message in self._receives:
            arrived(message)


def _finished(works: Iterable[dist.Work]) -> set[dist.Work]:
    """Those of some gloo works that end well in a moment; with the first that comes to no end, all connections close.

    Asked only after a failure.
    """
    deadline = time.monotonic() + _GRACE_SECONDS
    found = set()
    for work in works:
        with suppress(RuntimeError):
            work.wait(max(_TICK, timedelta(seconds=deadline - time.monotonic())))
            found.add(work)
    return found


def _reason(error: RuntimeError) -> str:
    """The first sentence of a backend's message, without the source line that it starts with."""
    text = str(error).splitlines()[0].split("] ", 1)[-1]
    return text.split(". ", 1)[0]
