"""When a job's state goes to host memory and comes back: by an order, for which the loop rests, or by its own word."""

import logging
import time

from dynatrain.train.agreement import SwitchAbortedError, exchange
from dynatrain.train.order import Order
from dynatrain.train.parking import Parking
from dynatrain.train.party import Party
from dynatrain.train.turns import Turns
from dynatrain.train.world import World

_LOG = logging.getLogger(__name__)

_REST_SECONDS = 0.05
"""Between two looks at what is asked of a parked job."""


class Travels:
    """One rank's.

    Args:
        party: this rank.
        parking: where its state is.
        turns: gives the orders.

    Attributes:
        count: how often the loop has said its word in this world, equal on all ranks.
    """

    def __init__(self, party: Party, parking: Parking, turns: Turns) -> None:
        self._party = party
        self._parking = parking
        self._turns = turns
        self.count = 0

    def agree(self, verb: str, *, goes: bool) -> None:
        """Hear from all ranks, which have come to the same word of their loops, that no switch has begun meanwhile.

        Args:
            verb: ``park`` or ``unpark``.
            goes: whether one begins at this rank's next edge.

        Raises:
            SwitchAbortedError: one does; on every rank.
        """
        told = exchange(
            self._party.board,
            f"travel/{self.count}",
            self._party.rank,
            payload=[goes, self._turns.switches],
            timeout=self._party.patience,
        ).in_order()
        self.count += 1
        if any(going for going, _ in told):
            raise SwitchAbortedError(f"a switch begins at the next step edge; {verb} behind it")
        self._turns.switches = told[0][1]

    def obey(self, world: World, order: Order, edge: int, step: int, since: float) -> Order | None:
        """Park, and return when the state is back; or while it is parked, where a member of the world is lost.

        Requests are answered meanwhile: what needs the state is refused, a stop brings it back first.

        Args:
            world: the present one.
            order: to park.
            edge: number of the edge at which this rank is.
            step: the next step.
            since: end of the last step, in seconds of ``perf_counter``.

        Returns:
            The order to stop for which it came back; None where it was unparked, or never parked, or a member is lost.
        """
        self._try(world, order, step, since)
        while self._parking.parked and not self._party.board.broken:
            following = self._turns.take(edge, step)
            if following is None:
                time.sleep(_REST_SECONDS)
            elif following.verb == "stop":
                back = self._turns.own("unpark", world.layout, by=following.by)
                if self._try(world, back, step, time.perf_counter()):
                    return following
                self._turns.answer(following, "aborted", "the run is parked, and its state cannot come back")
            else:
                self._try(world, following, step, time.perf_counter())
        return None

    def now(self, world: World, verb: str, step: int) -> None:
        """Park or unpark at once, on all ranks; nothing where it is so already.

        Raises:
            SwitchAbortedError: it could not be done, and all is as it was; on every rank.
        """
        if self._parking.parked != (verb == "park"):
            order = self._turns.own(verb, world.layout, by="program")
            self._parking.carry_out(world, order, step, time.perf_counter())

    def _try(self, world: World, order: Order, step: int, since: float) -> bool:
        """Whether it succeeded; whoever asked is told."""
        try:
            said = self._parking.carry_out(world, order, step, since)
        except SwitchAbortedError as abort:
            if self._party.rank == 0:
                _LOG.warning("switch %d (%s): aborted: %s", order.number, order.verb, abort)
            self._turns.answer(order, "aborted", str(abort), order.number)
            return False
        self._turns.answer(order, "done", said, order.number)
        return True
