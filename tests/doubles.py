"""Stand-ins for the transport: many ranks in one process, and deliveries as late as the contract allows."""

import queue
import random
import threading
import time
from collections import Counter

import torch

from dynatrain.execute.transport import Message, TransportError


class Hub:
    """Connects the :class:`LocalTransport` of ``size`` ranks that run as threads."""

    def __init__(self, size):
        self.size = size
        self.boxes, self.numbers = {}, Counter()
        self.closed = set()
        self.lock = threading.Lock()  # nobody's memory is read once it has closed

    def box(self, end, src, dst):
        """Where the next message of one pair goes, or comes from: they match in the order in which they were posted."""
        with self.lock:
            number = self.numbers[end, src, dst]
            self.numbers[end, src, dst] += 1
            return self.boxes.setdefault((src, dst, number), queue.SimpleQueue())


class LocalTransport:
    """In memory. Like a network card it reads a source at any time between post and wait: here, when it is received.

    ``tamper(src, dst, tensor)`` may change a message that has just arrived. ``direct`` says of a peer whether messages
    go from place to place.
    """

    name = "local"

    def __init__(self, hub, rank, tamper=None, direct=lambda _peer: False):
        self.hub, self.rank, self.size, self.tamper, self.direct = hub, rank, hub.size, tamper, direct

    def post(self, sends, receives):
        sent = []
        for message in sends:
            assert message.tensor.is_contiguous() or self.direct(message.peer)
            done = threading.Event()
            self.hub.box("sent", self.rank, message.peer).put((message.tensor, done))
            sent.append((message.peer, done))
        expected = [(message, self.hub.box("received", message.peer, self.rank)) for message in receives]
        return _LocalPending(self, sent, expected)

    def close(self):
        with self.hub.lock:
            self.hub.closed.add(self.rank)


class _LocalPending:
    def __init__(self, transport, sent, receives):
        self.transport, self.hub, self.sent, self.receives = transport, transport.hub, sent, receives

    def wait(self, timeout_seconds, arrived=lambda _message: None):
        self.deadline = time.monotonic() + timeout_seconds
        for message, box in self.receives:
            self._receive(message, box)
            arrived(message)
        for peer, done in self.sent:
            while not done.wait(0.01):
                self._still_there(peer)

    def _receive(self, message, box):
        here = self.transport.rank
        while True:
            try:
                source, done = box.get(timeout=0.01)
                break
            except queue.Empty:
                self._still_there(message.peer)
        with self.hub.lock:
            self._still_there(message.peer)
            assert source.nbytes == message.tensor.nbytes, "both ends must derive the same messages"
            message.tensor.copy_(source)
        if self.transport.tamper:
            self.transport.tamper(message.peer, here, message.tensor)
        done.set()

    def _still_there(self, peer):
        if peer in self.hub.closed or time.monotonic() > self.deadline:
            raise TransportError([peer], "closed" if peer in self.hub.closed else "late")


class LateTransport:
    """Reads the sources and delivers only at ``wait``, pair by pair in random order; till then targets hold rubbish.

    A caller that reads a receive buffer, or writes or frees a source, between post and wait is found out.
    """

    def __init__(self, inner, seed):
        self.inner, self.size, self.name, self.direct = inner, inner.size, inner.name, inner.direct
        self.random = random.Random(seed)

    def post(self, sends, receives):
        for message in receives:
            message.tensor.fill_(0x55)
        return _LatePending(self, list(sends), list(receives))

    def close(self):
        self.inner.close()


class _LatePending:
    def __init__(self, transport, sends, receives):
        self.transport, self.sends, self.receives = transport, sends, receives

    def wait(self, timeout_seconds, arrived=lambda _message: None):
        assert all(m.tensor.untyped_storage().nbytes() for m in (*self.sends, *self.receives) if m.tensor.numel())
        sends = [Message(m.peer, m.tensor.clone()) for m in self._shuffled(self.sends)]
        receives = self._shuffled(self.receives)
        landing = [Message(m.peer, torch.empty_like(m.tensor)) for m in receives]
        self.transport.inner.post(sends, landing).wait(timeout_seconds)
        pairs = list(zip(receives, landing, strict=True))
        self.transport.random.shuffle(pairs)
        for message, landed in pairs:
            message.tensor.copy_(landed.tensor)
            arrived(message)

    def _shuffled(self, messages):
        """Peers in random order, the messages of each peer in theirs."""
        peers = sorted({m.peer for m in messages})
        self.transport.random.shuffle(peers)
        return [m for peer in peers for m in messages if m.peer == peer]
