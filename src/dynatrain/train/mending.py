"""What one survivor does about one loss: the muster, the common step, and the crossing to what is left."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dynatrain.cluster.summons import Summons
from dynatrain.execute.transport import sever
from dynatrain.layout.layout import Layout
from dynatrain.observe.checkpoints import checkpoint_name
from dynatrain.plan.errors import PlanError
from dynatrain.plan.left import Left
from dynatrain.plan.loss import Restore, restore
from dynatrain.plan.plan import Kept
from dynatrain.space.ownership import Ownership
from dynatrain.train.agreement import Objection, exchange
from dynatrain.train.attempt import Attempt
from dynatrain.train.keeping import Note
from dynatrain.train.muster import Coupled, Stand, decisive, memory, renumbered
from dynatrain.train.order import Order
from dynatrain.train.party import Party
from dynatrain.train.passage import numbers, remainder
from dynatrain.train.torch_private import process_groups
from dynatrain.train.torch_private_fsdp import drop_gathered
from dynatrain.train.world import World

JOIN_SECONDS = 0.02


class WorldLostError(RuntimeError):
    """Members of the world are lost, and the step under way cannot be finished: it comes again without them."""


class MendError(RuntimeError):
    """What is left after a loss cannot go on; the text says who is lost, and why not."""


def release() -> None:
    """Have the training thread come out of whatever it waits in: all connections of all groups are closed."""
    for group in process_groups():
        sever(group)


@dataclass(slots=True)
class Mending:
    """One survivor's way through one loss. All survivors ask the same questions, in this order.

    Attributes:
        party: in the world that has lost members.
        loss: who they are, and what is to follow.
        mustered: whether the muster has been held.
        found: what all go on from, once that is agreed.
        began: when this rank took note of the loss, in seconds of the monotonic clock.
    """

    party: Party
    loss: Summons
    mustered: bool = False
    found: Restore | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def number(self) -> int:
        """This rank's number among the survivors."""
        return self.loss.survivors.index(self.party.member)

    def muster(self, coupled: Coupled | None) -> Coupled | None:
        """The newest coupling that any survivor is through; ``coupled`` is this one's.

        Raises:
            SwitchAbortedError: a survivor was late, or is lost itself.
        """
        told = self._ask("muster", coupled)
        self.mustered = True
        return decisive((one[0], one[1]) if one else None for one in told)

    def stand(self, mine: Stand) -> list[Stand]:
        """Where all survivors stand, by number.

        Raises:
            SwitchAbortedError: a survivor was late, or is lost itself.
        """
        return [Stand.read(told) for told in self._ask("stand", asdict(mine))]

    def restore(self, world: World, stands: list[Stand]) -> Restore:
        """From which step all go on, and where each box of it comes from, by old ranks; equal on all survivors.

        Raises:
            MendError: of no step is everything left.
        """
        assert world.ownership is not None
        old, loss = world.ownership, self.loss
        ranks = {member: rank for rank, member in enumerate(loss.old)}
        lost, now = [ranks[member] for member in loss.lost], max(stand.step for stand in stands)
        gone = [Kept(holder=rank, owner=rank, step=now, live=True) for rank in lost]
        kept = memory(stands, [ranks[member] for member in loss.survivors])
        files = {*stands[0].files}.intersection(*(stand.files for stand in stands))
        try:
            self.found = restore(world.catalogue, old, lost=lost, kept=(*kept, *gone), files=files)
        except PlanError as error:
            raise MendError(f"{loss.why}; and what is left cannot go on: {error}") from error
        return self.found

    def attempt(
        self, world: World, target: Layout, order: Order, found: Restore, root: Path | None, notes: Sequence[Note]
    ) -> Attempt:
        """The crossing to what is left, not yet begun.

        Args:
            world: that has lost members.
            target: layout to come.
            order: the crossing.
            found: what all go on from.
            root: has the checkpoints.
            notes: of snapshots, in this rank's memory.
        """
        for part in world.parts:
            drop_gathered(part)
        assert world.ownership is not None
        layout = world.ownership.layout.over(numbers(self.loss))
        seen = replace(world, ownership=Ownership(layout, world.ownership.placements))
        way = remainder(self.party, self.loss, order)
        step = found.loss.files
        path = None if step is None or root is None else root / checkpoint_name(step)
        note = next((note for note in notes if note.step == found.loss.step and note.own_whole), None)
        wards = {numbers(self.loss)[ward]: kept for ward, kept in note.wards.items()} if note else {}
        return Attempt(
            way=way,
            order=order,
            target=target,
            old=seen,
            loss=renumbered(found.loss, numbers(self.loss)),
            checkpoint=path,
            note=None if Left(found.loss).live else note,
            wards=wards,
        )

    def order(self, stands: list[Stand]) -> Order:
        """The crossing as an order; its number and turn follow the last that any survivor knows of."""
        return Order(
            layout=self.loss.layout,
            members=self.loss.new,
            generation=self.loss.generation,
            turn=max(stand.turn for stand in stands),
            number=max(stand.switches for stand in stands) + 1,
            mode="keep",
            verb="loss",
            by=self.loss.why,
        )

    def prepare(self, attempt: Attempt) -> None:
        """Build and warm, together with all others. A thread that does not end is not waited for.

        Raises:
            SwitchAbortedError: some survivor cannot, or is lost itself.
        """
        attempt.start()
        assert self.party.worlds is not None
        alarm, why = self.party.worlds.alarm, ""
        while not (attempt.prepared or why):
            attempt.join(JOIN_SECONDS)
            waited = time.monotonic() - attempt.began
            if alarm is not None and alarm.beyond(self.loss.generation):
                why = "there is another loss"
            elif waited > 2 * self.party.patience:  # for build and for warm
                why = f"rank {self.party.rank} is not prepared after {waited:.3g} s"
        why = attempt.problem or why
        self._ask("prepared", None, Objection(why=why) if why else None)

    def _ask(self, what: str, payload: Any, objection: Objection | None = None) -> list[Any]:
        party, loss = self.party, self.loss
        assert party.worlds is not None
        board = party.worlds.crossing(loss.generation, len(loss.survivors))
        topic, wait = f"loss/{what}", party.patience
        return exchange(board, topic, self.number, payload=payload, objection=objection, timeout=wait).in_order()
