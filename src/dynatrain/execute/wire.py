"""What travels in which message, in which order: derived alike at both ends of every pair.

The moves between one ordered pair of ranks in one round become *items* (one state of one move), items are cut into
*parts* (boxes that are consecutive in the item's row-major order and at most :data:`FRAME_BYTES` long), and parts are
packed into *frames*, the messages. All of it follows from the moves alone, so that neither end needs to know how the
other stores its pieces.

Frames travel in *waves*, so that staging memory is bounded. The wave of a frame is ``(distance between the ranks //
FAN, number of the frame in its pair)``, which both ends compute alike, and each rank takes its waves in ascending
order. Among all unfinished waves the least one can always finish, because everybody in it has finished all lesser
ones: hence no deadlock, whatever the moves are.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dynatrain.plan.plan import Granule, Move, RankPlan
from dynatrain.space.box import Box, volume
from dynatrain.space.tensor import ITEMSIZE, Catalogue

FRAME_BYTES = 8 << 20
"""Longest message. Longer ones bring no more bandwidth, shorter ones cost latency."""

PACK_BYTES = 1 << 20
"""Parts shorter than this share a frame: below it the copy into a common buffer is cheaper than a message."""

FAN = 3
"""Most peers, in each direction, that one wave talks to."""


@dataclass(frozen=True, slots=True)
class Item:
    """One state of one move.

    Attributes:
        granule: which tensor and state.
        box: what of it.
        itemsize: bytes of one element.
    """

    granule: Granule
    box: Box
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return volume(self.box) * self.itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of one item inside a frame.

    Attributes:
        item: index in the pair's items.
        box: what of the granule.
        start: first byte in the frame.
        stop: one behind the last byte.
    """

    item: int
    box: Box
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Frame:
    """One message.

    Attributes:
        peer: the other end.
        parts: without gaps, in order.
        nbytes: length of the message.
    """

    peer: int
    parts: tuple[Part, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Wave:
    """Frames that one rank posts together."""

    sends: tuple[Frame, ...]
    receives: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's part of one round.

    Attributes:
        sends: items by receiving rank.
        receives: items by sending rank.
        relays: items that stay on the rank but are laid out anew.
        waves: frames of ``sends`` and ``receives``.
    """

    sends: dict[int, tuple[Item, ...]]
    receives: dict[int, tuple[Item, ...]]
    relays: tuple[Item, ...]
    waves: tuple[Wave, ...]


def routes(plan: RankPlan, catalogue: Catalogue, size: int) -> tuple[Route, ...]:
    """The route of every round.

    Args:
        plan: one rank's part.
        catalogue: the tensors that the plan numbers.
        size: number of ranks of the switch; equal on all of them.
    """
    sends, receives, relays = (_by_granule(moves) for moves in (plan.sends, plan.receives, plan.relays))
    found = []
    for granules in plan.schedule.rounds:
        out = _items(((m.dst, g, m.box) for g in granules for m in sends[g]), catalogue)
        incoming = _items(((m.src, g, m.box) for g in granules for m in receives[g]), catalogue)
        stay = _items(((m.dst, g, m.box) for g in granules for m in relays[g]), catalogue)
        waves = _waves(plan.rank, size, out, incoming)
        found.append(Route(sends=out, receives=incoming, relays=stay.get(plan.rank, ()), waves=waves))
    return tuple(found)


def tiles(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Cut ``box`` into boxes of at most ``limit`` bytes whose elements are consecutive in its row-major order."""
    nbytes = volume(box) * itemsize
    if nbytes <= limit:
        yield box
        return
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    rows = max(1, limit * (stop - start) // nbytes)
    for first in range(start, stop, rows):
        yield from tiles((*box[:dim], (first, min(first + rows, stop)), *box[dim + 1 :]), itemsize, limit)


def frames(peer: int, items: Iterable[Item]) -> tuple[Frame, ...]:
    """The messages that carry ``items``, in order. Payload only: there are no gaps."""
    found: list[Frame] = []
    pack: list[Part] = []
    filled = 0
    for index, item in enumerate(items):
        for box in tiles(item.box, item.itemsize, FRAME_BYTES):
            nbytes = volume(box) * item.itemsize
            if nbytes >= PACK_BYTES:
                found.append(Frame(peer, (Part(index, box, 0, nbytes),), nbytes))
                continue
            if filled + nbytes > FRAME_BYTES:
                found.append(Frame(peer, tuple(pack), filled))
                pack, filled = [], 0
            pack.append(Part(index, box, filled, filled + nbytes))
            filled += nbytes
    if pack:
        found.append(Frame(peer, tuple(pack), filled))
    return tuple(found)


def _by_granule(moves: Iterable[Move]) -> defaultdict[Granule, list[Move]]:
    found = defaultdict(list)
    for move in moves:
        for state in move.states:
            found[move.tensor, state].append(move)
    return found


def _items(triples: Iterable[tuple[int, Granule, Box]], catalogue: Catalogue) -> dict[int, tuple[Item, ...]]:
    """Items by peer, in wire order: long elements first (then every part is aligned), then by granule and box."""
    found = defaultdict(list)
    for peer, (tensor, state), box in triples:
        if volume(box):
            itemsize = ITEMSIZE[catalogue[tensor].states[state].dtype]
            found[peer].append(Item((tensor, state), box, itemsize))
    return {
        peer: tuple(sorted(items, key=lambda item: (-item.itemsize, item.granule, item.box)))
        for peer, items in found.items()
    }


def _waves(
    rank: int, size: int, sends: dict[int, tuple[Item, ...]], receives: dict[int, tuple[Item, ...]]
) -> tuple[Wave, ...]:
    """The frames of all peers in the order in which this rank posts them."""
    found: defaultdict[tuple[int, int], tuple[list[Frame], list[Frame]]] = defaultdict(lambda: ([], []))
    for way, by_peer in enumerate((sends, receives)):
        for peer, items in by_peer.items():
            distance = (peer - rank if way == 0 else rank - peer) % size
            for number, frame in enumerate(frames(peer, items)):
                found[(distance - 1) // FAN, number][way].append(frame)
    return tuple(Wave(tuple(out), tuple(incoming)) for _, (out, incoming) in sorted(found.items()))
