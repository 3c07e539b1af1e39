"""A job whose state is in host memory for a while, so that something else can have its devices."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from dynatrain.execute.host import HostSegment
from dynatrain.execute.pages import give_up_spare
from dynatrain.execute.pieces import Piece, Pieces
from dynatrain.plan.plan import Granule
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.blueprint import FITS, Blueprint, Free, free_bytes
from dynatrain.train.install import leaf_values
from dynatrain.train.order import Order
from dynatrain.train.party import Party
from dynatrain.train.proof import Proof
from dynatrain.train.quiet import at_rest
from dynatrain.train.record import Recorder
from dynatrain.train.retire import Hidden, tensors_of
from dynatrain.train.trip import Trip
from dynatrain.train.world import World


class ParkedError(RuntimeError):
    """Something was asked of a job that cannot be done while its state is parked."""


@dataclass(slots=True, kw_only=True)
class _Parked:
    """What is in host memory.

    Attributes:
        segment: all of it.
        pieces: in the segment.
        device: the pieces whose memory was given up for it.
        proof: has noted their digests.
        hidden: the handles of the world.
    """

    segment: HostSegment
    pieces: Pieces
    device: Pieces
    proof: Proof
    hidden: Hidden


@dataclass(slots=True)
class Parking:
    """Where one rank's state is, and its ways from here to there. Mutated; all methods are called by all ranks.

    Attributes:
        party: this rank.
        recorder: keeps the books; None keeps none.
    """

    party: Party
    recorder: Recorder | None
    _parked: _Parked | None = field(default=None)

    @property
    def parked(self) -> bool:
        """Whether the state is in host memory."""
        return self._parked is not None

    def require_here(self, what: str) -> None:
        """Refuse what needs the state.

        Raises:
            ParkedError: it is parked.
        """
        if self.parked:
            raise ParkedError(f"{what}: the job's state is parked in host memory; unpark it first")

    def carry_out(self, world: World, order: Order, step: int, since: float) -> str:
        """Park, or unpark, as ``order`` says.

        Args:
            world: the present one.
            order: numbered.
            step: the next step.
            since: when training stood still, in seconds of ``perf_counter``.

        Returns:
            What it took, for people.

        Raises:
            SwitchAbortedError: all is as it was; on every rank.
        """
        trip = Trip(party=self.party, order=order, old=world)
        told: dict[int, Any] = {}
        try:
            told = self._park(trip) if order.verb == "park" else self._unpark(trip)
        except SwitchAbortedError as abort:
            self._ended(trip, "aborted", str(abort), step, told)
            raise
        finally:
            trip.close()
        trip.seconds["stall"] = time.perf_counter() - since
        self._ended(trip, "committed", "", step, told)
        return _words(trip)

    def _park(self, trip: Trip) -> dict[int, Any]:
        trip.prepare(self._host_room)
        world, party = trip.old, self.party
        device: Pieces = {}
        pieces: Pieces = {}
        segments: list[HostSegment] = []

        def source() -> Pieces:
            assert trip.blueprint is not None
            segments.append(HostSegment(trip.blueprint.host[party.rank]))
            trip.host = segments[0].nbytes
            device.update(at_rest(party, world, gives_up=True))
            return device

        def target(granule: Granule) -> Piece | None:
            if (piece := device.get(granule)) is None:
                return None
            pieces[granule] = Piece(segments[0].cut(tuple(piece.tensor.shape), piece.tensor.dtype), piece.box)
            return pieces[granule]

        try:
            trip.carry(source, target, like=None)
            told = trip.settle()
        except SwitchAbortedError:
            for segment in segments:  # none where this rank did not come so far
                segment.close()
            raise
        trip.give_up_source()
        why = f"is parked in host memory since switch {trip.order.number}"
        hidden = Hidden(world.parts, tensors_of(world.found, world.optimizer, leaf_values(world)), why)
        self._parked = _Parked(segment=segments[0], pieces=pieces, device=device, proof=trip.proof, hidden=hidden)
        segments[0].rest()
        give_up_spare()
        if party.device.type == "cuda":
            torch.cuda.empty_cache()  # what the allocator keeps, nobody else can have
        return told

    def _unpark(self, trip: Trip) -> dict[int, Any]:
        parked, memory = self._parked, self.party.memory
        assert parked is not None
        trip.prepare(self._device_room)
        trip.host = parked.segment.nbytes

        def target(granule: Granule) -> Piece | None:
            piece = parked.device.get(granule)
            if piece is not None:
                memory.restore(piece)
            return piece

        try:
            trip.carry(lambda: parked.pieces, target, like=parked.proof)
            told = trip.settle()
        except SwitchAbortedError:
            for piece in parked.device.values():  # also those that were restored before the executor knew of them
                memory.give_back(piece)
            parked.segment.rest()
            raise
        parked.segment.close()
        parked.hidden.show()
        self._parked = None
        return told

    def bring_back(self) -> None:
        """Give this rank its state back without the others: a member is lost, and nobody votes any more.

        Raises:
            ParkedError: it has other bits than were parked.
            RuntimeError: something else has the device's memory.
        """
        parked, memory = self._parked, self.party.memory
        assert parked is not None
        for granule, piece in parked.device.items():
            memory.restore(piece)
            piece.tensor.copy_(parked.pieces[granule].tensor)
        if not parked.proof.restored(parked.device):
            raise ParkedError("host memory has other bits than were parked")
        parked.segment.close()
        parked.hidden.show()
        self._parked = None

    def _host_room(self, blueprint: Blueprint) -> str:
        """Why this rank's machine cannot take what its ranks would park; empty where it can."""
        sharing = self.party.ranks_per_node or self.party.world_size
        free, most = free_bytes(torch.device("cpu")), max(blueprint.host)
        if most * sharing <= FITS * free:
            return ""
        return (
            f"parking takes {most} bytes of host memory for each of {sharing} ranks of a machine; {free} are free, of "
            f"which {FITS:.0%} may be taken"
        )

    def _device_room(self, blueprint: Blueprint) -> str:
        """Why the state cannot come back to this rank's device; empty where it can."""
        mine, promise = blueprint.peak[self.party.rank], self.party.memory.promise
        device, free = self.party.device, free_bytes(self.party.device)
        sharing = 1 if device.type == "cuda" else self.party.ranks_per_node or self.party.world_size
        if mine * sharing > free:
            return f"the state needs {mine} bytes for each of {sharing} ranks on {device}, of which {free} are free"
        return Free(nbytes=free, promised=promise.room if promise else None).beyond(mine)

    def _ended(self, trip: Trip, outcome: str, reason: str, step: int, told: dict[int, Any]) -> None:
        if self.recorder:
            self.recorder.ended(trip, outcome, reason, step, told)
        self.party.hook(outcome, -1, trip.order.number)
        if self.parked:
            self.party.hook("parked", -1, trip.order.number)


def _words(trip: Trip) -> str:
    assert trip.blueprint is not None
    here, there = max(trip.blueprint.peak), max(trip.blueprint.host)
    where = "is back from host memory" if trip.order.verb == "unpark" else "is in host memory, and its device is free"
    return f"the state {where}; most of one rank: {here:,} bytes on {trip.party.device.type}, {there:,} on the host"
