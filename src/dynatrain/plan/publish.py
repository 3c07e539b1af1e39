"""Plans with an inference engine at the far end: its ranks are holders behind the run's, and its layout an ownership.

The moves are those of any plan. What the engine's own tensors are adds to each of them a place in one of these and a
transform; nothing else of a plan changes. Where experts lie apart there, a move of several is a delivery for each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dynatrain.layout.layout import Layout
from dynatrain.plan.build import rank_plan
from dynatrain.plan.plan import Delivery, Move, RankPlan, Schedule, Transform
from dynatrain.plan.schedule import keep_schedule
from dynatrain.space.box import Box, intersect, volume
from dynatrain.space.engine import Engine, Slot
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import ITEMSIZE

INDEX_BYTES = 4
"""Of the place of one changed element."""

CALL_SECONDS = 10.0
"""Of one call that brings a round, about, where the rate is bounded: engines, and what lies on the way to them, give up
on calls that do not return."""


def round_bytes_at(rate: float, run: Layout, engine: Layout, round_bytes: int) -> int:
    """Bytes of the tensors of one round whose call takes no longer than :data:`CALL_SECONDS`, about.

    The ranks that cut a tensor send it together, to each replica of the engine once. Those that hold copies take turns,
    but all of a round may be one's. A tensor is not divided among rounds.

    Args:
        rate: bytes a second that each rank of the run sends at most; 0 for no bound.
        run: its layout.
        engine: its layout.
        round_bytes: the most.
    """
    if not rate:
        return round_bytes
    senders = run.world_size // (run.size("pp") * run.size("dp"))
    return max(1, min(round_bytes, int(CALL_SECONDS * rate * senders / engine.size("dp"))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The plan of a publish, as every rank of the run derives it alone.

    Attributes:
        engine: at the far end.
        old: the run's ownership.
        new: the engine's, its ranks numbered behind the run's.
        holders: of both together.
        schedule: rounds, whose tensors are at most so many bytes together; equal everywhere.
    """

    engine: Engine
    old: Ownership
    new: Ownership
    holders: int
    schedule: Schedule

    @classmethod
    def of(cls, engine: Engine, old: Ownership, round_bytes: int) -> "Publication":
        """The plan between a run's ownership and an engine's; rounds are cut as those of a switch are."""
        first = max(old.layout.ranks) + 1
        behind = engine.ownership.layout.over([first + rank for rank in engine.ranks])
        return cls(
            engine=engine,
            old=old,
            new=Ownership(behind, engine.ownership.placements),
            holders=first + len(engine.ranks),
            schedule=keep_schedule(engine.catalogue, round_bytes),
        )

    @property
    def first(self) -> int:
        """The holder that is the engine's rank 0."""
        return self.holders - len(self.engine.ranks)

    def part(self, holder: int) -> RankPlan:
        """What a holder sends (of the run) or receives (of the engine)."""
        return rank_plan(self.engine.catalogue, self.old, self.new, holder, self.schedule)

    def deliveries(self, moves: Iterable[Move]) -> tuple[Delivery, ...]:
        """What becomes of moves to the engine there."""
        slots = {rank: self._slots(rank) for rank in self.engine.ranks}
        return tuple(
            self._delivered(replace(move, box=box), name, slot)
            for move in moves
            for name, slot in slots[move.dst - self.first][move.tensor]
            if (box := intersect(move.box, slot.box)) is not None
        )

    def rounds(self, deliveries: Sequence[Delivery]) -> tuple[dict[int, tuple[Delivery, ...]], ...]:
        """Deliveries by round, and within it by the engine's rank that they go to."""
        number = {granule: at for at, granules in enumerate(self.schedule.rounds) for granule in granules}
        found: tuple[dict[int, list[Delivery]], ...] = tuple({} for _ in self.schedule.rounds)
        for one in deliveries:
            of_round = found[number[one.move.tensor, one.move.states[0]]]
            of_round.setdefault(one.move.dst - self.first, []).append(one)
        return tuple({rank: tuple(its) for rank, its in of_round.items()} for of_round in found)

    def _slots(self, rank: int) -> Mapping[int, Sequence[tuple[str, Slot]]]:
        """Of each tensor of the catalogue that a rank of the engine has, where it lies."""
        index = {tensor.name: number for number, tensor in enumerate(self.engine.catalogue)}
        found: dict[int, list[tuple[str, Slot]]] = {}
        for name, slots in self.engine.slots(rank).items():
            for slot in slots:
                found.setdefault(index[slot.tensor], []).append((name, slot))
        return found

    def _delivered(self, move: Move, name: str, slot: Slot) -> Delivery:
        inside = [(low - start, high - start) for (low, high), (start, _) in zip(move.box, slot.box, strict=True)]
        inside = inside[1:] if slot.apart else inside
        inside = inside[::-1] if slot.transposed else inside
        place = tuple((at + low, at + high) for (low, high), (at, _) in zip(inside, slot.place, strict=True))
        assert intersect(place, slot.place) == place
        return Delivery(move, name, place, Transform(self.engine.dtype_of(name), slot.transposed, slot.apart))


Key = tuple[int, Box]
"""What is copied once, however many ranks of the engine it goes to: a tensor by its number, and a box of it."""


def copies(deliveries: Iterable[Delivery]) -> dict[Key, Transform]:
    """What a rank of the run copies to the host for its deliveries, and how."""
    return {(one.move.tensor, one.move.box): one.transform for one in deliveries}


def copied_bytes(deliveries: Iterable[Delivery]) -> int:
    """Bytes of the snapshot that a rank of the run holds until all is sent."""
    return sum(volume(box) * ITEMSIZE[how.cast] for (_, box), how in copies(deliveries).items())


def predicted_bytes(
    deliveries: Sequence[Delivery], rounds: Iterable[Mapping[int, Sequence[Delivery]]], *, changes: bool
) -> int:
    """The most that a rank of the run ever holds on the host for a publish.

    A copy of what it sends, out of which messages are sent as they are. For changes also the version before, and one
    message for each of the engine's ranks, as they ask for one at a time each; none is longer than what it stands for.

    Args:
        deliveries: of the rank.
        rounds: the same, by round and by rank of the engine.
        changes: whether only changes are sent, or the next publish is to send only changes.
    """
    held = copied_bytes(deliveries)
    if not changes:
        return held
    longest: dict[int, int] = {}
    for of_round in rounds:
        for rank, its in of_round.items():
            size = sum(volume(one.place) * ITEMSIZE[one.transform.cast] for one in its)
            longest[rank] = max(longest.get(rank, 0), size)
    return 2 * held + sum(longest.values())
