"""What an exchange has under way: messages, the pieces that they come from or go to, and their running checksums."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash

from dynatrain.execute.pages import memory_of
from dynatrain.execute.pieces import Piece
from dynatrain.execute.transport import Message, Pending
from dynatrain.execute.wire import Item, Route
from dynatrain.space.box import Box, within


@dataclass(slots=True)
class Stream:
    """The running checksum of one item, over its parts in wire order."""

    item: Item
    hash: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)

    def update(self, data: torch.Tensor) -> None:
        """Hash what comes next, contiguous."""
        on_host = data.cpu()
        self.hash.update(memory_of(on_host))


class Sums:
    """Checksums of one round, by peer."""

    def __init__(self, route: Route) -> None:
        self.sent = {peer: [Stream(item) for item in items] for peer, items in route.sends.items()}
        self.received = {peer: [Stream(item) for item in items] for peer, items in route.receives.items()}


@dataclass(frozen=True, slots=True)
class Slot:
    """One part: its place in its piece, and in the staging buffer where it goes through one."""

    stream: Stream
    view: torch.Tensor
    inside: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Parcel:
    """One message and what is in it."""

    message: Message
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Direct:
    """What was posted to go from place to place in one round."""

    pending: Pending
    sends: list[Parcel]
    receives: list[Parcel]


@dataclass(frozen=True, slots=True)
class Told:
    """Checksums under way: those that senders tell, by sender."""

    sums: dict[int, torch.Tensor]
    pending: Pending


@dataclass(frozen=True, slots=True)
class Flight:
    """A posted wave."""

    pending: Pending
    receives: list[Parcel]
    staged: list[torch.Tensor]


def view_of(piece: Piece, box: Box) -> torch.Tensor:
    """What of a piece lies in ``box``."""
    return piece.tensor if box == piece.box else piece.tensor[within(box, piece.box)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor whose rows are contiguous, in its shape."""
    return (tensor if tensor.dim() else tensor.reshape(1)).view(torch.uint8)


def sums_of(streams: Sequence[Stream]) -> torch.Tensor:
    """The checksums so far, as int64."""
    return torch.from_numpy(np.array([stream.hash.intdigest() for stream in streams], dtype=np.uint64).view(np.int64))


def run_bytes(rows: torch.Tensor) -> int:
    """The longest stretch of :func:`as_rows` that lies without a gap."""
    length = 1
    for size, stride in zip(reversed(rows.shape), reversed(rows.stride()), strict=True):
        if size > 1 and stride != length:
            break
        length *= size
    return length
