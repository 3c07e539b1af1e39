"""One round on the wire: pieces to messages to pieces, with a checksum per move at both ends.

Where the transport goes from place to place, so does each item; one that lies in short rows is packed first, as far as
there is room, because a kernel that reads another process looks every row up by itself. Else a part that is alone in
its frame and contiguous where it lies travels straight from or into its piece, and all others go through staging
buffers. The sender hashes what it hands to the transport, the receiver what lies in the target piece afterwards; where
items go from place to place, each as it arrives: what was just written is still in the caches. Where nobody writes the
sources after the move (``keep``), senders hash later what others read as it lay, and ends compare then.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from dynatrain.execute import wire
from dynatrain.execute.pages import touch
from dynatrain.execute.parcels import (
    Direct,
    Flight,
    Parcel,
    Slot,
    Stream,
    Sums,
    Told,
    as_bytes,
    as_rows,
    run_bytes,
    sums_of,
    view_of,
)
from dynatrain.execute.pieces import Piece, Pieces, Pool
from dynatrain.execute.transport import Message, Transport
from dynatrain.execute.wire import DEPTH, FAN, Bundle, Item, Route, Wave, room, routes
from dynatrain.plan.plan import Granule, RankPlan
from dynatrain.space.box import Box, intersect, tiles, whole, within
from dynatrain.space.tensor import Catalogue


class CorruptMove(RuntimeError):  # noqa: N818 - says what happened
    """Bytes arrived other than they were sent.

    Attributes:
        tensor: canonical name.
        state: name of the state.
        box: of the move.
        src: rank that sent.
        dst: rank that received.
    """

    def __init__(self, *, tensor: str, state: str, box: Box, src: int, dst: int) -> None:
        self.tensor, self.state, self.box, self.src, self.dst = tensor, state, box, src, dst
        super().__init__(f"{tensor} {state}, box {box}: rank {dst} holds other bytes than rank {src} sent")


SCRATCH_BYTES = 1 << 18
"""What strided bytes are copied to a little at a time, to be hashed: it stays in the cache."""

PACKED_ROW_BYTES = 1 << 14
"""Rows shorter than this are packed before another process reads them."""


def staging_bound(routes: Sequence[Route]) -> int:
    """Most bytes of staging memory that carrying ``routes`` out can take on their rank: at most ``STAGING_BYTES``."""
    most = 2 * DEPTH * FAN if any(route.waves for route in routes) else 1
    return most * _longest(routes) + _packed(routes)


class Exchange:
    """Moves the bytes of one rank's rounds. Made before the stall: what can be derived from the plan is derived here.

    Args:
        plan: the rank's part.
        catalogue: the tensors that the plan numbers.
        transport: joins the ranks.
        pool: gives staging memory, at most :func:`staging_bound`, until :meth:`release`.
        keeps_sources: nobody writes the old pieces, but for adopted ones, before :meth:`confirm`, which must then be
            called by all ranks; else each round compares its checksums itself. Alike on all ranks.

    Attributes:
        kept: what this rank may be asked for beside its own old pieces: after a loss, pieces of its wards.
        plan: the rank's part.
        catalogue: the tensors that the plan numbers.
        transport: joins the ranks.
        pool: counts the memory.
        routes: of all rounds.
        ledger: payload bytes by (source rank, destination rank).
        hash_seconds: spent on checksums so far, inside rounds.
    """

    def __init__(
        self, *, plan: RankPlan, catalogue: Catalogue, transport: Transport, pool: Pool, keeps_sources: bool = False
    ) -> None:
        self.plan = plan
        self.catalogue = catalogue
        self.transport = transport
        self.pool = pool
        self.routes = routes(plan, catalogue, transport.size, transport.direct)
        self.kept: dict[Granule, list[Piece]] = {}
        self.ledger: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.hash_seconds = 0.0
        self._rank = plan.rank
        self._keeps_sources, self._adopted = keeps_sources, frozenset(plan.adopted)
        self._open: list[tuple[Sums, list[Parcel]]] = []
        self._longest = _longest(self.routes)
        self._packed = _packed(self.routes)
        self._rooms: list[torch.Tensor] = []
        self._staging: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []

    def warm(self) -> int:
        """Allocate the staging memory now, so that none of it is touched first inside the stall; returns its bytes."""
        together = max((max(_together(route.waves), bool(route.direct)) for route in self.routes), default=0)
        buffers = [self._buffer() for _ in range(together)]
        self._free += buffers
        self._make_rooms()
        for buffer in self._staging:
            touch(buffer)
        return sum(buffer.nbytes for buffer in self._staging)

    def round(self, route: Route, old: Pieces, new: Pieces, deadline: float, posted: Callable[[], None]) -> None:
        """Fill this rank's new pieces of one round and serve the others theirs.

        Args:
            route: of the round.
            old: pieces that are read.
            new: pieces that are written.
            deadline: on the monotonic clock, in seconds, for every transfer.
            posted: called once, when the first transfers are under way.

        Raises:
            TransportError: a peer is gone or late. Buffers may be in use until the transport is closed.
            CorruptMove: checksums of a move differ.
        """
        sums = Sums(route)
        near = self._launch_direct(route, sums, old, new)
        now, later = self._when(near.sends)
        self._hash(now)  # not before they are posted: others read them meanwhile
        flying: deque[Flight] = deque()
        for wave in route.waves:
            if len(flying) == DEPTH:
                self._land(flying.popleft(), deadline)
            flying.append(self._launch(wave, sums, old, new))
            if wave is route.waves[0]:
                posted()
        if not route.waves:
            posted()
        told = None if self._keeps_sources else self._tell(sums)
        self._relay(route.relays, old, new)
        while flying:
            self._land(flying.popleft(), deadline)
        self._land_direct(near, deadline)
        if told is None:
            self._open.append((sums, later))
        else:
            self._compare(sums, told, deadline)

    def confirm(self, seconds: float) -> None:
        """Hash the sources that were kept, and compare the checksums of all rounds with the other ranks.

        Allocates a little memory that the pool does not count. Nothing is left to do where no sources are kept.

        Args:
            seconds: from now to the end of the last transfer.

        Raises:
            TransportError: a peer is gone or late.
            CorruptMove: checksums of a move differ.
        """
        deadline = time.monotonic() + seconds
        buffer, told = torch.empty(SCRATCH_BYTES, dtype=torch.uint8), []
        while self._open:
            sums, parcels = self._open.pop(0)
            self._hash(parcels, buffer)
            told.append((sums, self._tell(sums)))
        for sums, its in told:
            self._compare(sums, its, deadline)

    def release(self) -> None:
        """Give the staging memory back. Only when no transfer uses it: all done, or the transport closed."""
        self._free.clear()
        self._rooms = []
        while self._staging:
            self.pool.drop(self._staging.pop())

    def _launch_direct(self, route: Route, sums: Sums, old: Pieces, new: Pieces) -> Direct:
        """Post all items of the peers to whom the transport goes from place to place."""
        sends, receives = (
            [
                Parcel(Message(peer, view), (Slot(stream, view, None),))
                for peer in route.direct
                for stream in streams_of.get(peer, ())
                for item in [stream.item]
                for view in [as_rows(view_of(self._piece(pieces, item.granule, item.box), item.box))]
            ]
            for streams_of, pieces in ((sums.sent, old), (sums.received, new))
        )
        for parcel in sends:
            self.ledger[self._rank, parcel.message.peer] += parcel.message.tensor.nbytes
        packed = self._pack_rows(sends)
        pending = self.transport.post([parcel.message for parcel in packed], [parcel.message for parcel in receives])
        return Direct(pending, [parcel for parcel in packed if parcel.slots], receives)

    def _pack_rows(self, sends: Sequence[Parcel]) -> list[Parcel]:
        """Copies of what lies in short rows, in the place of it, as far as there is room; they are hashed at once."""
        found, rooms, start = list[Parcel](), deque[torch.Tensor](), 0
        if any(_is_short(parcel.message.tensor) for parcel in sends):
            rooms.extend(self._make_rooms())
        for parcel in sends:
            view = parcel.message.tensor
            while rooms and _is_short(view) and start + view.nbytes > len(rooms[0]):
                rooms.popleft()
                start = 0
            if not rooms or not _is_short(view):
                found.append(parcel)
                continue
            copy = rooms[0][start : start + view.nbytes].view(view.shape).copy_(view)
            start += view.nbytes
            self._update(parcel.slots[0].stream, copy)
            found.append(Parcel(Message(parcel.message.peer, copy), ()))
        return found

    def _launch(self, wave: Wave, sums: Sums, old: Pieces, new: Pieces) -> Flight:
        """Pack and post one wave."""
        staged: list[torch.Tensor] = []
        receives = [parcel for bundle in wave.receives for parcel in self._parcels(bundle, sums.received, new, staged)]
        sends = [parcel for bundle in wave.sends for parcel in self._parcels(bundle, sums.sent, old, staged)]
        for parcel in sends:
            for slot in parcel.slots:
                if slot.inside is not None:
                    slot.inside.copy_(slot.view)
                self._update(slot.stream, slot.view if slot.inside is None else slot.inside)
            self.ledger[self._rank, parcel.message.peer] += parcel.message.tensor.nbytes
        pending = self.transport.post([parcel.message for parcel in sends], [parcel.message for parcel in receives])
        return Flight(pending, receives, staged)

    def _land(self, flight: Flight, deadline: float) -> None:
        """Wait for one wave and put what arrived where it belongs."""
        flight.pending.wait(max(0.0, deadline - time.monotonic()))
        for parcel in flight.receives:
            for slot in parcel.slots:
                if slot.inside is not None:
                    slot.view.copy_(slot.inside)
                if slot.inside is None or slot.view.is_contiguous():
                    self._update(slot.stream, slot.view)
                else:
                    self._update(slot.stream, slot.inside.copy_(slot.view))
            self.ledger[parcel.message.peer, self._rank] += parcel.message.tensor.nbytes
        self._free += flight.staged

    def _when(self, sends: Sequence[Parcel]) -> tuple[list[Parcel], list[Parcel]]:
        """What has to be hashed in its round, and what may be later. New modules write what they have adopted."""
        found: tuple[list[Parcel], list[Parcel]] = [], []
        for parcel in sends:
            found[self._keeps_sources and parcel.slots[0].stream.item.granule not in self._adopted].append(parcel)
        return found

    def _land_direct(self, flight: Direct, deadline: float) -> None:
        """Wait until everything was read, by this rank, which hashes each item as it arrives, and of it."""
        arriving = {id(parcel.message): parcel for parcel in flight.receives}

        def arrived(message: Message) -> None:
            self.ledger[message.peer, self._rank] += message.tensor.nbytes
            self._hash([arriving[id(message)]])

        flight.pending.wait(max(0.0, deadline - time.monotonic()), arrived)

    def _hash(self, parcels: Sequence[Parcel], scratch: torch.Tensor | None = None) -> None:
        """Hash bytes where they lie; strided ones a little at a time through ``scratch``, which stays in the cache."""
        if not parcels:
            return
        began = time.perf_counter()
        buffer = self._buffer() if scratch is None else scratch
        for view, stream in ((slot.view, slot.stream) for parcel in parcels for slot in parcel.slots):
            box = whole(tuple(view.shape))
            for tile in [box] if view.is_contiguous() else tiles(box, 1, min(SCRATCH_BYTES, len(buffer))):
                part = view[within(tile, box)]
                stream.update(part if part.is_contiguous() else buffer[: part.numel()].view(part.shape).copy_(part))
        if scratch is None:
            self._free.append(buffer)
            self.hash_seconds += time.perf_counter() - began

    def _update(self, stream: Stream, data: torch.Tensor) -> None:
        began = time.perf_counter()
        stream.update(data)
        self.hash_seconds += time.perf_counter() - began

    def _parcels(
        self, bundle: Bundle, streams_of: Mapping[int, Sequence[Stream]], pieces: Pieces, staged: list[torch.Tensor]
    ) -> Iterator[Parcel]:
        """Messages over the memory that their bytes come from or go to; a staging buffer that they need is added."""
        streams, buffer, start = streams_of[bundle.peer], None, 0
        for frame in bundle.frames:
            items = [streams[part.item].item for part in frame.parts]
            views = [
                view_of(self._piece(pieces, item.granule, part.box), part.box)
                for item, part in zip(items, frame.parts, strict=True)
            ]
            if len(views) == 1 and views[0].is_contiguous():
                slots = (Slot(streams[frame.parts[0].item], views[0], None),)
                yield Parcel(Message(bundle.peer, as_bytes(views[0])), slots)
                continue
            if buffer is None:
                buffer = self._buffer()
                staged.append(buffer)
            data = buffer[start : start + frame.nbytes]
            start += room(frame)
            slots = tuple(
                Slot(streams[part.item], view, data[part.start : part.stop].view(view.dtype).view(view.shape))
                for part, view in zip(frame.parts, views, strict=True)
            )
            yield Parcel(Message(bundle.peer, data), slots)

    def _piece(self, pieces: Pieces, granule: Granule, box: Box) -> Piece:
        """The piece that has ``box``."""
        own = pieces.get(granule)
        if granule not in self.kept or (own is not None and intersect(own.box, box) == box):
            return pieces[granule]
        return next(piece for piece in self.kept[granule] if intersect(piece.box, box) == box)

    def _make_rooms(self) -> Sequence[torch.Tensor]:
        """The memory that short rows are packed in, of one round at a time; none is longer than a bundle."""
        if not self._rooms:
            sizes = [min(wire.BUNDLE_BYTES, self._packed - at) for at in range(0, self._packed, wire.BUNDLE_BYTES)]
            self._rooms = [self.pool.allocate((size,), torch.uint8) for size in sizes]
            self._staging += self._rooms
        return self._rooms

    def _buffer(self) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        self._staging.append(self.pool.allocate((self._longest,), torch.uint8))
        return self._staging[-1]

    def _relay(self, relays: Sequence[Item], old: Pieces, new: Pieces) -> None:
        """Lay out anew what stays on this rank."""
        for item in relays:
            source, target = self._piece(old, item.granule, item.box), new[item.granule]
            target.tensor[within(item.box, target.box)] = source.tensor[within(item.box, source.box)]
            self.ledger[self._rank, self._rank] += item.nbytes

    def _tell(self, sums: Sums) -> Told:
        """Post the checksums, one message per peer: everything was packed, so the sender's are known."""
        device = self.pool.device
        told = {
            peer: torch.empty(len(streams), dtype=torch.int64, device=device) for peer, streams in sums.received.items()
        }
        sends = [Message(peer, sums_of(streams).to(device)) for peer, streams in sums.sent.items()]
        return Told(told, self.transport.post(sends, [Message(peer, there) for peer, there in told.items()]))

    def _compare(self, sums: Sums, told: Told, deadline: float) -> None:
        told.pending.wait(max(0.0, deadline - time.monotonic()))
        for peer, streams in sums.received.items():
            differ = (told.sums[peer].cpu() != sums_of(streams)).nonzero()
            if len(differ):
                item = streams[int(differ[0])].item
                tensor, state = self.catalogue[item.granule[0]], item.granule[1]
                raise CorruptMove(
                    tensor=tensor.name, state=tensor.states[state].name, box=item.box, src=peer, dst=self._rank
                )


def _longest(routes: Sequence[Route]) -> int:
    waves = [wave for route in routes for wave in route.waves]
    least = SCRATCH_BYTES if any(route.direct for route in routes) else 0
    return max((bundle.nbytes for wave in waves for bundle in (*wave.sends, *wave.receives)), default=least)


def _packed(routes: Sequence[Route]) -> int:
    """Bytes for short rows of one round: at most what staging has beside :data:`SCRATCH_BYTES`; none beside waves."""
    if any(route.waves for route in routes):
        return 0
    most = max((sum(item.nbytes for items in route.sends.values() for item in items) for route in routes), default=0)
    return min(most, max(0, 2 * DEPTH * FAN * wire.BUNDLE_BYTES - SCRATCH_BYTES))


def _is_short(rows: torch.Tensor) -> bool:
    """Whether it lies in rows that are packed before they are read, and fits into the memory for that."""
    return rows.nbytes <= wire.BUNDLE_BYTES and run_bytes(rows) < min(PACKED_ROW_BYTES, rows.nbytes)


def _together(waves: Sequence[Wave]) -> int:
    """Most bundles that are under way at once: those of :data:`DEPTH` consecutive waves."""
    bundles = [len(wave.sends) + len(wave.receives) for wave in waves]
    return max((sum(bundles[first : first + DEPTH]) for first in range(len(bundles))), default=0)
