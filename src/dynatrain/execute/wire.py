"""What travels in which message, in which order: derived alike at both ends of every pair.

The moves between one ordered pair of ranks in one round become *items* (one state of one move), items are cut into
*parts* (boxes that are consecutive in the item's row-major order and at most :data:`BUNDLE_BYTES` long), and parts are
packed into *frames*, the messages. All of it follows from the moves alone, so that neither end needs to know how the
other stores its pieces.

Frames travel in *waves*, so that staging memory is bounded: a wave takes one *bundle* of frames, at most
:data:`BUNDLE_BYTES`, of each of at most :data:`FAN` peers each way. The wave of a bundle is ``((distance between the
ranks - 1) // FAN, number of the bundle in its pair)``, which both ends compute alike, and each rank takes its waves in
ascending order. Among all unfinished waves the least one can always finish, because everybody in it has finished all
lesser ones: hence no deadlock, whatever the moves are.

Between ranks whose transport goes from place to place nothing is staged: each item is a message of its own, and all
items of a round are posted at once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from dynatrain.plan.plan import Granule, Move, RankPlan
from dynatrain.plan.schedule import STAGING_BYTES
from dynatrain.space.box import Box, tiles, volume
from dynatrain.space.tensor import ITEMSIZE, Catalogue

PACK_BYTES = 1 << 20
"""Parts shorter than this share a frame: below it the copy into a common buffer is cheaper than a message."""

FAN = 3
"""Most peers, in each direction, that one wave talks to."""

DEPTH = 2
"""Waves in flight at once: the next one is packed while the last one travels."""

BUNDLE_BYTES = STAGING_BYTES // (2 * DEPTH * FAN)
"""Most bytes that one pair has under way, in one direction, in one wave; hence also the longest message. With it all
staging buffers that can be in use at once fit into what the plan leaves to the execution."""


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
        parts: without gaps, in order.
        nbytes: length of the message.
    """

    parts: tuple[Part, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """Frames of one pair of ranks that are posted together.

    Attributes:
        peer: the other end.
        frames: in order.
    """

    peer: int
    frames: tuple[Frame, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer that can hold all frames."""
        return sum(map(room, self.frames))


@dataclass(frozen=True, slots=True)
class Wave:
    """Bundles that one rank posts together."""

    sends: tuple[Bundle, ...]
    receives: tuple[Bundle, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's part of one round.

    Attributes:
        sends: items by receiving rank.
        receives: items by sending rank.
        relays: items that stay on the rank but are laid out anew.
        direct: peers to whom each item goes as it lies.
        waves: ``sends`` and ``receives`` of all other peers as messages.
    """

    sends: dict[int, tuple[Item, ...]]
    receives: dict[int, tuple[Item, ...]]
    relays: tuple[Item, ...]
    direct: tuple[int, ...]
    waves: tuple[Wave, ...]


def routes(
    plan: RankPlan, catalogue: Catalogue, size: int, direct: Callable[[int], bool] = lambda _peer: False
) -> tuple[Route, ...]:
    """The route of every round.

    Args:
        plan: one rank's part.
        catalogue: the tensors that the plan numbers.
        size: number of ranks of the switch; equal on all of them.
        direct: whether messages from and to a peer need no staging; alike at both ends.
    """
    sends, receives, relays = (_by_granule(moves) for moves in (plan.sends, plan.receives, plan.relays))
    found = []
    for granules in plan.schedule.rounds:
        out = _items(((m.dst, g, m.box) for g in granules for m in sends[g]), catalogue)
        incoming = _items(((m.src, g, m.box) for g in granules for m in receives[g]), catalogue)
        stay = _items(((m.dst, g, m.box) for g in granules for m in relays[g]), catalogue)
        near = tuple(peer for peer in sorted({*out, *incoming}) if direct(peer))
        waves = _waves(plan.rank, size, *({p: of for p, of in way.items() if p not in near} for way in (out, incoming)))
        found.append(Route(sends=out, receives=incoming, relays=stay.get(plan.rank, ()), direct=near, waves=waves))
    return tuple(found)


def room(frame: Frame) -> int:
    """Bytes that a frame takes in a buffer, such that the next one is aligned for every dtype."""
    return -(-frame.nbytes // 16) * 16


def frames(items: Iterable[Item]) -> Iterator[Frame]:
    """The messages that carry ``items``, in order."""
    pack: list[Part] = []
    filled = 0
    for index, item in enumerate(items):
        for box in tiles(item.box, item.itemsize, BUNDLE_BYTES):
            nbytes = volume(box) * item.itemsize
            if nbytes >= PACK_BYTES:
                yield Frame((Part(index, box, 0, nbytes),), nbytes)
                continue
            if filled + nbytes > BUNDLE_BYTES:
                yield Frame(tuple(pack), filled)
                pack, filled = [], 0
            pack.append(Part(index, box, filled, filled + nbytes))
            filled += nbytes
    if pack:
        yield Frame(tuple(pack), filled)


def bundles(peer: int, items: Iterable[Item]) -> Iterator[Bundle]:
    """The frames that carry ``items``, in order, by wave."""
    together: list[Frame] = []
    for frame in frames(items):
        if together and sum(map(room, together)) + room(frame) > BUNDLE_BYTES:
            yield Bundle(peer, tuple(together))
            together = []
        together.append(frame)
    if together:
        yield Bundle(peer, tuple(together))


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
    """The bundles of all peers in the order in which this rank posts them."""
    found: defaultdict[tuple[int, int], tuple[list[Bundle], list[Bundle]]] = defaultdict(lambda: ([], []))
    for way, by_peer in enumerate((sends, receives)):
        for peer, items in by_peer.items():
            distance = (peer - rank if way == 0 else rank - peer) % size
            for number, bundle in enumerate(bundles(peer, items)):
                found[(distance - 1) // FAN, number][way].append(bundle)
    return tuple(Wave(tuple(out), tuple(incoming)) for _, (out, incoming) in sorted(found.items()))
