"""Snapshots against losses: every few steps each rank notes its own pieces, and sends what it alone has to its keeper.

Copies are made beside a forward and backward, as a save's are, by a thread that has only the processor time that
training leaves over; what is sent goes over a group of its own, at most so many bytes a second. While a snapshot is
made the one before it stays, on all ranks: the next one is not begun before all have said that they have this one
whole, and they agree on the edge from which on it may be, so that a snapshot is of one step on all ranks. A rank thus
holds two notes at most. Nothing is sent before all have their copies: where the loop has written on one rank what was
being copied there, the snapshot is dropped on all, the one before it stays, and the next one is begun when it is due.
What belongs to a step and is no tensor is noted at its edge.

A switch makes notes worthless, since they are of boxes that nobody owns any more: they are dropped, and the next
snapshot is due at once.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dynatrain.cluster.kernel import step_aside
from dynatrain.execute.packing import packed, packed_bytes, unpacked
from dynatrain.execute.pieces import Piece, Pieces
from dynatrain.execute.transport import GroupTransport, Message
from dynatrain.plan.keepers import Keepers, keepers, kept_boxes
from dynatrain.plan.plan import Granule
from dynatrain.space.box import Box
from dynatrain.train.account import Account, take
from dynatrain.train.agreement import Objection, SwitchAbortedError, exchange, objection_of
from dynatrain.train.extra_state import extra_states, give_extra_states
from dynatrain.train.party import Party
from dynatrain.train.registered import snapshot
from dynatrain.train.snapshot import Snapshot
from dynatrain.train.streams import Streams
from dynatrain.train.world import World
from dynatrain.train.written import Watch

_LOG = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
"""Of what is sent to a keeper at once."""

WAIT_SECONDS = 600.0
"""For one chunk: whoever is to take it may be in a long step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeps:
    """How a job keeps snapshots.

    Attributes:
        every: steps between two; 0 for none.
        bytes_per_second: most that a rank sends to its keeper.
    """

    every: int = 0
    bytes_per_second: float = 50 << 20


@dataclass(slots=True, kw_only=True)
class Note:
    """What one rank has of one snapshot.

    Attributes:
        step: so many steps were trained.
        own: copies of its own pieces.
        wards: by rank, what it keeps of others.
        account: what is no tensor.
        extra: extra state of its modules, by name.
        seconds: that it took, once it is whole.
        sent: bytes that went to the keeper.
    """

    step: int
    account: Account
    extra: dict[str, Any]
    own: Pieces = field(default_factory=dict)
    wards: dict[int, Pieces] = field(default_factory=dict)
    seconds: float = 0.0
    sent: int = 0
    own_whole: bool = False
    wards_whole: bool = False

    @property
    def whole(self) -> bool:
        """Whether all of it has arrived, and this rank's keeper has what it was sent."""
        return self.own_whole and self.wards_whole

    def take_rest(self, world: World, device: torch.device) -> None:
        """Give ``world``, whose tensors are those of the note's step, what is no tensor.

        Raises:
            SwitchAbortedError: a module has extra state that this rank has not noted, by name.
        """
        if unknown := sorted({owner.name for owner in world.owners} - self.extra.keys()):
            raise SwitchAbortedError(f"no note on this rank has the extra state of {', '.join(unknown)}")
        take(world, self.account.common, self.account.groups, self.account.optimizers)
        give_extra_states(world.owners, self.extra)
        Streams.of(self.account.streams).restore(device)


class Keeping:
    """The snapshots of one rank in one layout.

    Args:
        party: this rank.
        world: the layout, bound.
        keeps: how.
        series: number that no other layout of this world has had: of the switch that led to it.
        told: called with each note that is whole.

    Attributes:
        world: the layout.
    """

    def __init__(
        self, party: Party, world: World, keeps: Keeps, series: int, told: Callable[[Note, Keepers], None]
    ) -> None:
        assert world.ownership is not None
        self._party = party
        self.world = world
        self._keeps = keeps
        self._series = series
        self._told = told
        self._keepers = keepers(world.catalogue, world.ownership, party.nodes)
        self._boxes = {
            rank: kept_boxes(world.catalogue, world.ownership, rank)
            for rank in (party.rank, *self._keepers.wards(party.rank))
        }
        self._notes: list[Note] = []
        self._under_way: _Taking | None = None
        self._number = 0
        self._allowed = 0  # edge from which on all ranks may begin the next; -1 while that is open

    @property
    def notes(self) -> tuple[Note, ...]:
        """What this rank has, oldest first; the last may not be whole."""
        return tuple(self._notes)

    def edge(self, edge: int, step: int) -> None:
        """Begin a snapshot where one is due and all ranks may; on all ranks alike."""
        if self._under_way is not None and self._under_way.done:
            refused, self._under_way = self._under_way.refused, None
            if refused:
                self._notes.pop()
            elif self._notes[-1].whole:
                self._told(self._notes[-1], self._keepers)
            ended = refused or self._notes[-1].whole
            if ended and self._party.board.vote(self._topic, self._party.rank, edge):
                self._party.board.decide(self._topic, {"edge": edge + 1})
        if self._allowed < 0 and (found := self._party.board.decided(self._topic)) is not None:
            self._allowed = found["edge"]
            self._party.board.leave(self._topic)
        due = self._number == 0 or step % self._keeps.every == 0
        if due and 0 <= self._allowed <= edge:
            self._begin(step)

    def before_a_write(self) -> None:
        """Return when nothing that is about to be written is still to be copied."""
        if self._under_way is not None:
            self._under_way.wait_copied()

    def give_up(self) -> None:
        """The snapshot that is under way, if any, will never be whole."""
        if self._under_way is not None:
            self._under_way.give_up()

    def end(self) -> None:
        """No snapshot is made any more. On all ranks; what they were to agree on is taken down."""
        self.give_up()
        if self._allowed < 0:
            self._party.board.leave(self._topic)

    @property
    def _topic(self) -> str:
        return f"kept/{self._series}/{self._number}"

    def _begin(self, step: int) -> None:
        party, world = self._party, self.world
        self._notes = self._notes[-1:]
        self._number += 1
        self._allowed = -1
        note = Note(step=step, account=Account.of(party, world, step), extra=snapshot(extra_states(world.owners), ()))
        self._notes.append(note)
        rate = self._keeps.bytes_per_second
        self._under_way = _Taking(party, world, note, self._keepers, self._boxes, rate, f"{self._topic}/copied")
        self._under_way.start()


class _Taking:
    """One snapshot while it is made; ``note`` fills up.

    Attributes:
        refused: it is given up, on all ranks alike, because one of them has no copies of the step.
    """

    def __init__(
        self,
        party: Party,
        world: World,
        note: Note,
        keepers: Keepers,
        boxes: Mapping[int, Mapping[Granule, Box]],
        bytes_per_second: float,
        topic: str,
    ) -> None:
        self._party = party
        # Of this world: the party may go on to another one meanwhile.
        self._rank, self._everyone, self._groups = party.rank, party.everyone, party.groups
        self._catalogue = world.catalogue
        self._note = note
        self._keepers = keepers
        self._boxes = boxes
        self._rate = bytes_per_second
        self._topic = topic
        self.refused = False
        self._pieces = world.pieces(party.rank, party.device)
        tensors = {}
        for granule, piece in self._pieces.items():
            state = world.catalogue[granule[0]].states[granule[1]]
            # What a forward may write, or code between two optimizer steps, is copied at once.
            early = state.name == "buffer" or state.name in world.forms
            tensors[_key(granule)] = piece.tensor.clone() if early else piece.tensor
        watch, by_key = Watch(world, self._pieces, closely=True), {_key(granule): granule for granule in self._pieces}
        self._copies = Snapshot(tensors, 0, check=lambda key: watch.require_unwritten(by_key[key]))
        self._thread = threading.Thread(target=self._run, name="keeping", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._copies.start()
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait_copied(self) -> None:
        """Before anything writes what is noted."""
        if not self._copies.wait_copied(self._party.deadline):
            self._copies.give_up(f"its copies took more than {self._party.deadline:g} s")

    def give_up(self) -> None:
        """Copy no more."""
        self._copies.give_up("the snapshot was given up")

    def _run(self) -> None:
        began = time.monotonic()
        try:
            step_aside()
            self._agree(self._take())
            self._note.own_whole = True
            self._exchange()
            self._note.wards_whole = True
        except Exception as error:  # noqa: BLE001 - a snapshot never ends a run
            step, rank = self._note.step, self._party.rank
            _LOG.warning("the snapshot of step %d is not whole on rank %d: %s", step, rank, error)
        self._note.seconds = time.monotonic() - began

    def _take(self) -> Objection | None:
        """Fill the note with the copies; why there are none."""
        try:
            for granule, piece in self._pieces.items():
                copy = self._copies.take(_key(granule))
                self._note.own[granule] = Piece(copy.contiguous(), piece.box)
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            return objection_of(problem)
        finally:
            self._pieces = {}
        return None

    def _agree(self, objection: Objection | None) -> None:
        """Return when all ranks have their copies.

        Raises:
            SwitchAbortedError: one has none.
        """
        board, rank = self._party.board, self._party.rank
        try:
            exchange(board, self._topic, rank, payload=None, objection=objection, timeout=WAIT_SECONDS)
        except SwitchAbortedError:
            self.refused = True
            raise

    def _exchange(self) -> None:
        """Send what this rank alone has to its keeper, and take its wards'."""
        if not any(keeper is not None for keeper in self._keepers.keeper):
            return
        keeper, everyone = self._keepers.keeper[self._rank], self._everyone
        group = self._groups.get("keep", everyone, backend="gloo")
        transport, arriving = GroupTransport(group, everyone), []
        for ward in self._keepers.wards(self._rank):
            flat = torch.empty(packed_bytes(self._catalogue, self._boxes[ward]), dtype=torch.uint8)
            arriving += [Message(ward, chunk) for chunk in flat.split(CHUNK_BYTES)]
            self._note.wards[ward] = unpacked(self._catalogue, self._boxes[ward], flat)
        pending = transport.post([], arriving)
        if keeper is not None:
            self._send(transport, keeper)
        pending.wait(WAIT_SECONDS)

    def _send(self, transport: GroupTransport, keeper: int) -> None:
        began = time.monotonic()
        boxes = self._boxes[self._rank]
        for chunk in packed(self._catalogue, boxes, self._note.own, CHUNK_BYTES):
            transport.post([Message(keeper, chunk)], []).wait(WAIT_SECONDS)
            self._note.sent += chunk.numel()
            time.sleep(max(0.0, began + self._note.sent / self._rate - time.monotonic()))


def _key(granule: Granule) -> str:
    return f"{granule[0]}/{granule[1]}"
