"""Moves between ranks of one machine: who receives reads what the other holds, from place to place, in one copy.

A few bytes go over another transport, the wire: the sender tells where a message lies, the receiver that it was read.
So a failure is seen as it always is: a rank that is gone has closed its connections, one that is late is named.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from dynatrain.execute.attach import Spans, let_others_read, machine, read
from dynatrain.execute.transport import Arrived, GroupTransport, Message, Pending, Transport, TransportError, untold

MEETING_SECONDS = 30.0
"""How long ranks whose group has just been made wait for each other."""


class Nearest:
    """Makes the transports of switches: memory between ranks that can read each other's, the group between all others.

    What is found out of a group is remembered: the ranks of a group that is used again need not meet for it, and one
    that is late, or has failed before, keeps nobody waiting.
    """

    def __init__(self) -> None:
        self._near: WeakKeyDictionary[dist.ProcessGroup, Mapping[int, int]] = WeakKeyDictionary()

    def __call__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> Transport:
        """Called by all members of ``group``; arguments as of :class:`~dynatrain.execute.transport.GroupTransport`.

        Raises:
            TransportError: of a new group; a rank is gone or late.
        """
        wire = GroupTransport(group, ranks)
        if group.name() == "nccl":  # state lies on devices
            return wire
        if group not in self._near:
            mine = ranks[group.rank()]
            self._near[group] = neighbours(wire, [rank for rank in ranks if rank != mine], MEETING_SECONDS)
        near = self._near[group]
        return MemoryTransport(wire, near) if near else wire


def neighbours(wire: Transport, peers: Sequence[int], seconds: float) -> dict[int, int]:
    """Number of the process of each peer that this rank can read, and that can read this rank. On all ranks together.

    Found out by trying: each reads a random number out of the memory of the others.

    Raises:
        TransportError: a rank is gone or late.
    """
    deadline = time.monotonic() + seconds
    let_others_read()
    token = torch.tensor([int.from_bytes(os.urandom(7), "little")])
    mine = [machine(), os.getpid(), token.data_ptr(), int(token)]
    told = _exchange(wire, dict.fromkeys(peers, mine), deadline)
    able = {peer: told[peer][0] == mine[0] and _can_read(*told[peer][1:], deadline) for peer in peers}
    back = _exchange(wire, {peer: [int(can)] for peer, can in able.items()}, deadline)
    return {peer: told[peer][1] for peer in peers if able[peer] and back[peer] == [1]}


def _exchange(wire: Transport, words: Mapping[int, Sequence[int]], deadline: float) -> dict[int, list[int]]:
    """Tell each peer some numbers; what each of them told, which were equally many."""
    sends = [Message(peer, torch.tensor(of, dtype=torch.int64)) for peer, of in words.items()]
    receives = [Message(message.peer, torch.empty_like(message.tensor)) for message in sends]
    wire.post(sends, receives).wait(max(0.0, deadline - time.monotonic()))
    return {message.peer: message.tensor.tolist() for message in receives}


def _can_read(process: int, address: int, token: int, deadline: float) -> bool:
    found = torch.zeros(1, dtype=torch.int64)
    try:
        read(process, Spans.of(address, (8,), (1,)), _spans(found), deadline)
    except (OSError, TimeoutError):
        return False
    return int(found) == token


class MemoryTransport:
    """A transport over another one, which joins the same ranks and is used by nobody else meanwhile.

    Both ends of a pair post and wait in the same order.

    Args:
        wire: carries what goes to ranks that are not near, and the words about what does.
        near: of :func:`neighbours`.
    """

    def __init__(self, wire: Transport, near: Mapping[int, int]) -> None:
        self._wire = wire
        self._near = near
        self.size = wire.size

    @property
    def name(self) -> str:
        """``memory``, and behind it what carries the rest."""
        return "memory" if len(self._near) == self.size - 1 else f"memory, {self._wire.name}"

    def direct(self, peer: int) -> bool:
        """Whether messages of ``peer`` may have any strides; see :class:`~dynatrain.execute.transport.Transport`."""
        return peer in self._near

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start transfers; see :class:`~dynatrain.execute.transport.Transport`."""
        far = [[message for message in of if message.peer not in self._near] for of in (sends, receives)]
        given, taken = _by_peer(sends, self._near), _by_peer(receives, self._near)
        asked = {
            peer: torch.empty(sum(1 + message.tensor.dim() for message in of), dtype=torch.int64)
            for peer, of in taken.items()
        }
        told = [Message(peer, _places(of)) for peer, of in given.items()]
        # A pending of its own for each: what one has told can be read before the others have.
        waits = {peer: self._wire.post([], [Message(peer, places)]) for peer, places in asked.items()}
        rest = self._wire.post([*told, *far[0]], far[1])
        return _Reads(self._wire, self._near, taken, asked, waits, rest, given)

    def close(self) -> None:
        """Give up; see :class:`~dynatrain.execute.transport.Transport`."""
        self._wire.close()


class _Reads:
    """Posted transfers: those that this rank reads, those that others read of it, and those on the wire."""

    def __init__(
        self,
        wire: Transport,
        near: Mapping[int, int],
        taken: Mapping[int, Sequence[Message]],
        asked: Mapping[int, torch.Tensor],
        waits: Mapping[int, Pending],
        rest: Pending,
        given: Mapping[int, Sequence[Message]],
    ) -> None:
        self._wire, self._near = wire, near
        self._taken, self._asked, self._waits, self._rest = taken, asked, waits, rest
        self._given = given  # the tensors must live until they were read

    def wait(self, timeout_seconds: float, arrived: Arrived = untold) -> None:
        deadline = time.monotonic() + timeout_seconds
        for peer, messages in self._taken.items():
            self._waits[peer].wait(_left(deadline))
            self._read(peer, messages, deadline, arrived)
        done = [Message(peer, torch.ones(1, dtype=torch.int64)) for peer in self._taken]
        seen = [Message(peer, torch.zeros(1, dtype=torch.int64)) for peer in self._given]
        self._rest.wait(_left(deadline), arrived)
        self._wire.post(done, seen).wait(_left(deadline))

    def _read(self, peer: int, messages: Sequence[Message], deadline: float, arrived: Arrived) -> None:
        places = self._asked[peer].tolist()
        for message in messages:
            address, *strides = places[: 1 + message.tensor.dim()]
            del places[: 1 + message.tensor.dim()]
            source = _spans_at(message.tensor, address, strides)
            try:
                read(self._near[peer], source, _spans(message.tensor), deadline)
            except TimeoutError as error:
                raise TransportError([peer], "reading its memory was not done in time") from error
            except OSError as error:
                raise TransportError([peer], f"its memory could not be read: {error.strerror}") from error
            arrived(message)


def _by_peer(messages: Iterable[Message], near: Mapping[int, int]) -> dict[int, list[Message]]:
    found: defaultdict[int, list[Message]] = defaultdict(list)
    for message in messages:
        if message.peer in near:
            found[message.peer].append(message)
    return found


def _places(messages: Sequence[Message]) -> torch.Tensor:
    """Where messages lie: of each the address and the strides; the shape is known at both ends."""
    words = [number for one in messages for number in (one.tensor.data_ptr(), *one.tensor.stride())]
    return torch.tensor(words, dtype=torch.int64)


def _spans(tensor: torch.Tensor) -> Spans:
    return _spans_at(tensor, tensor.data_ptr(), tensor.stride())


def _spans_at(tensor: torch.Tensor, address: int, strides: Sequence[int]) -> Spans:
    """Those of a tensor like this one that lies elsewhere, in strides of elements."""
    width = tensor.itemsize
    return Spans.of(address, (*tensor.shape, width), (*(stride * width for stride in strides), 1))


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
