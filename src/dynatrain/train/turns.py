"""Which order comes next: rank 0 chooses, all follow the same decisions in the same sequence."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from dynatrain.layout.form import LayoutError
from dynatrain.layout.layout import Layout
from dynatrain.layout.text import print_layout
from dynatrain.train.order import Order
from dynatrain.train.parking import Parking
from dynatrain.train.party import Party
from dynatrain.train.saver import Saver
from dynatrain.train.targets import Read
from dynatrain.train.wishes import Wishes

_LOG = logging.getLogger(__name__)

_WHILE_PARKED = ("park", "unpark", "stop")


class Turns:
    """The sequence of a job's orders, as one rank follows it.

    Args:
        party: this rank.
        wishes: what is asked for; rank 0's counts.
        read: reads a layout's text and refuses what this job cannot have.
        present: the layout now.
        saver: saves the job.
        parking: where the job's state is.
        switches: how many the run has had before this job.
        refused: told of an order that nobody waits for an answer to, as one of the schedule, and why it is not begun.
    """

    def __init__(
        self,
        party: Party,
        wishes: Wishes,
        read: Read,
        present: Callable[[], Layout],
        saver: Saver,
        parking: Parking,
        switches: int,
        refused: Callable[[Order, int, str], None] = lambda _order, _step, _why: None,
    ) -> None:
        self._party = party
        self._wishes = wishes
        self._read = read
        self._present = present
        self._saver = saver
        self._parking = parking
        self._switches = switches
        self._refused = refused
        self._turn = 1

    def take(self, edge: int, step: int) -> Order | None:
        """The next order, once there is one; each is given out once.

        Args:
            edge: number of the edge at which this rank is.
            step: the next step.
        """
        board, topic = self._party.board, f"turn/{self._turn}"
        if self._party.rank == 0 and (order := self._choose(edge, step)) is not None:
            found = board.decide(topic, asdict(order))
        else:
            found = board.decided(topic)
        if found is None:
            return None
        self._turn += 1
        board.leave(topic)
        order = Order.read(found)
        self._switches += order.numbered
        return order

    @property
    def turn(self) -> int:
        """Number of the next order."""
        return self._turn

    def inherit(self, step: int) -> None:
        """Rank 0 is lost, or this is it: the queue here counts from now on.

        What was scheduled for later steps is known to every rank, and requests that nobody has answered are still up.
        """
        if self._party.rank != 0:
            self._wishes.begun(step)

    def own(self, verb: str, layout: Layout, *, by: str) -> Order:
        """An order that nobody has asked for by a request, and all ranks give themselves at the same place."""
        self._switches += 1
        return Order(layout=print_layout(layout), number=self._switches, verb=verb, by=by)

    @property
    def switches(self) -> int:
        """How many the run has had, and has under way; another rank may not have heard of the last one yet."""
        return self._switches

    @switches.setter
    def switches(self, count: int) -> None:
        self._switches = count

    def books(self) -> dict[str, Any]:
        """What a rank that becomes rank 0 in another world has to know."""
        return self._wishes.state()

    def cross(self, order: Order, books: Mapping[str, Any]) -> None:
        """Go on behind ``order``, a crossing, in the world that it led to."""
        self._turn, self._switches = order.turn + 1, order.number
        if self._party.rank == 0:
            self._wishes.take_over(books)

    def ask(self, layout: str, *, mode: str, by: str, at: int = -1, after: int = 0, verb: str = "switch") -> None:
        """A wish of the loop itself, which all ranks may say."""
        if self._party.rank == 0:
            self._wishes.add(layout, mode=mode, at=at, after=after, by=by, verb=verb)

    def expect(self, request_id: str, at: int, answered: Callable[[], bool]) -> None:
        """See :meth:`~dynatrain.train.wishes.Wishes.expect`; all ranks may say it."""
        if self._party.rank == 0:
            self._wishes.expect(request_id, at, answered, self._party.deadline)

    def ask_save(self, *, by: str) -> None:
        """The loop wishes to be saved, which all ranks may say."""
        if self._party.rank == 0:
            self._wishes.add_save(by=by)

    def begun(self, step: int) -> None:
        """The job begins, or goes on, at a step."""
        self._wishes.begun(step)

    def answer(self, order: Order, outcome: str, message: str, switch: int | None = None) -> None:
        """Tell whoever asked what became of it."""
        if order.numbered and (promise := self._party.memory.promise) is not None:
            promise.end_turn(self._party.memory)
        if self._party.rank == 0:
            self._wishes.answer(order, outcome, message, switch)

    def _choose(self, edge: int, step: int) -> Order | None:
        """What rank 0 wants next. A save waits for the one under way, and holds up nothing else meanwhile."""
        waiting, chosen = [], None
        for order in self._wishes.due(step):
            if (refusal := self._refuse(order)) is not None:
                self.answer(order, *refusal)
                if order.request < 0 and refusal[0] == "refused":
                    _LOG.warning("%s to %s, asked for by %s: %s", order.verb, order.layout, order.by, refusal[1])
                    self._refused(order, step, refusal[1])
            elif self._must_wait(order):
                waiting.append(order)
            else:
                number = self._switches + 1 if order.numbered else 0
                chosen = replace(order, turn=self._turn, number=number, edge=edge)
                break
        self._wishes.put_back(waiting)
        return chosen

    def _must_wait(self, order: Order) -> bool:
        """Whether it cannot begin yet: behind another save, behind a switch of another job, or as the job is parked."""
        memory = self._party.memory
        if self._parking.parked and order.verb not in _WHILE_PARKED:
            return True
        if order.numbered and memory.promise is not None:
            return not memory.promise.take_turn(memory)
        return order.verb == "save" and self._saver.busy

    def _refuse(self, order: Order) -> tuple[str, str] | None:
        """``(outcome, message)`` of an order that needs or allows no attempt."""
        if order.deadline is not None and time.time() > order.deadline:
            return "refused", f"taken up {time.time() - order.deadline:.1f} s after its deadline; ask again"
        if order.verb == "stop":
            return None
        if order.verb in {"park", "unpark"}:
            same = self._parking.parked == (order.verb == "park")
            return ("unchanged", f"the run is {'' if self._parking.parked else 'not '}parked") if same else None
        if self._parking.parked and order.request >= 0:
            return "refused", "the run is parked: its state is in host memory; unpark it first"
        if order.verb == "save":
            return None if self._saver.on else ("refused", "this run is not saved: it has no place for checkpoints")
        return self._refuse_target(order)

    def _refuse_target(self, order: Order) -> tuple[str, str] | None:
        """The same of a switch, by the world and the layout that it is to lead to."""
        if order.members and self._party.worlds is None:
            return "refused", "this loop has one world alone: no agent of the run starts and ends its ranks"
        try:
            target = self._read(order.layout, len(order.members) or self._party.world_size)
        except LayoutError as error:
            return "refused", str(error)
        if order.verb == "prepare":  # the present one's is how to free what is held
            return None
        if target == self._present() and order.members in {(), self._party.members}:
            return "unchanged", f"the layout is {print_layout(target)} already"
        return None
