"""What is asked of a job and not yet begun: scheduled switches, requests on the board, and the loop's own wishes."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from dynatrain.cluster.board import Board
from dynatrain.config.run import STEPS_BETWEEN
from dynatrain.train.argument import ArgumentError
from dynatrain.train.order import Order

LEAD_STEPS = 2
"""A scheduled switch is announced that many steps before its step, so that it is built beside training."""

_EDGES: Mapping[int, int] = MappingProxyType({})

_POLL_SECONDS = 0.005


def check_schedule(schedule: Mapping[int, str], inside: Mapping[int, int]) -> None:
    """Refuse a schedule that cannot be kept.

    Raises:
        ArgumentError: every problem, with the nearest that can.
    """
    problems = [f"schedule has step {at}: a job begins in its first layout; nearest: 1" for at in schedule if at < 1]
    for one, other in itertools.pairwise(sorted(schedule)):
        if other < one + STEPS_BETWEEN:
            rule = f"{STEPS_BETWEEN} or more behind the one before, which is {one}"
            problems.append(f"schedule has step {other}: {rule}; nearest: {one + STEPS_BETWEEN}")
    for at, after in inside.items():
        if at not in schedule:
            near = min(schedule, key=lambda other: abs(other - at), default=None)
            said = "there are no scheduled switches" if near is None else f"nearest with one: {near}"
            problems.append(f"inside has step {at}, where no switch is scheduled; {said}")
        if after < 0:
            problems.append(f"inside has {after} micro-batches at step {at}; nearest: 0, at the step's edge")
    if problems:
        raise ArgumentError("; ".join(problems))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Expected:
    """A request that is still with the agent; fields as of :meth:`Wishes.expect`."""

    at: int
    answered: Callable[[], bool]
    patience: float


class Wishes:
    """The queue of rank 0. Other ranks follow what is decided and never look here.

    Args:
        board: where requests are put up.
        schedule: ``{step: layout}``: first step in that layout.
        mode: of switches that do not name one.
        every: steps between two saves; 0 for none.
        inside: ``{step: micro-batches}`` of scheduled switches that come inside their step.

    Raises:
        ArgumentError: a schedule that cannot be kept.
    """

    def __init__(
        self, board: Board, schedule: Mapping[int, str], mode: str, every: int = 0, inside: Mapping[int, int] = _EDGES
    ) -> None:
        check_schedule(schedule, inside)
        self._board = board
        self._promised = [
            Order(layout=layout, mode=mode, at=at, after=inside.get(at, 0), by="schedule")
            for at, layout in sorted(schedule.items())
        ]
        self._every = every
        self._next_save = self._after(0)
        self._mode = mode
        self._asked: list[Order] = []
        self._interval: list[Order] = []  # one at most: a save that is overtaken by the next is left out
        self._seen = 0
        self._expected: dict[str, _Expected] = {}

    def add(self, layout: str, *, mode: str, at: int, after: int, by: str, verb: str = "switch") -> None:
        """A wish of the loop itself. One for a later step is kept until then: one order is under way at a time."""
        order = Order(layout=layout, mode=mode or self._mode, at=at, after=after, by=by, verb=verb)
        (self._asked if at < 0 else self._promised).append(order)

    def add_save(self, *, by: str) -> None:
        """The loop wishes to be saved."""
        self._asked.append(Order(layout="", verb="save", by=by))

    def expect(self, request_id: str, at: int, answered: Callable[[], bool], patience: float) -> None:
        """The loop has asked the agent for other members from a step on: the queue is not looked into without that.

        The agent puts it up here once newcomers are there, or answers it by itself. Training goes on meanwhile, up to
        the edge at which the switch has to be announced.

        Args:
            request_id: of the request.
            at: first step that is to be in that world.
            answered: whether the agent has answered it.
            patience: seconds to wait at that edge.
        """
        self._expected[request_id] = _Expected(at=at, answered=answered, patience=patience)

    def state(self) -> dict[str, Any]:
        """What is in the queue, as plain values: for the rank 0 of another world."""
        return {
            "next_save": self._next_save,
            "promised": [asdict(order) for order in self._promised],
            "asked": [asdict(order) for order in self._asked],
            "interval": [asdict(order) for order in self._interval],
            "seen": self._seen,
        }

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state` gave."""
        self._next_save, self._seen = state["next_save"], state["seen"]
        self._promised, self._asked, self._interval = (
            [Order.read(told) for told in state[of]] for of in ("promised", "asked", "interval")
        )

    def put_back(self, orders: list[Order]) -> None:
        """Orders that cannot begin yet: they come again at the next edge."""
        for order in orders:
            (self._interval if order.by == "interval" else self._asked).append(order)

    def begun(self, step: int) -> None:
        """The job begins, or goes on, at a step: what was due before is not due any more."""
        self._promised = [order for order in self._promised if order.at >= step]
        self._next_save = self._after(step)

    def _after(self, step: int) -> int:
        """The next step after ``step`` before which the job is saved by itself."""
        return (step // self._every + 1) * self._every if self._every else 0

    def due(self, step: int) -> Iterator[Order]:
        """Take the wishes that could begin at ``step``, one by one, oldest first; take no more than can be begun."""
        self._take_promised(step)
        if self._every and self._next_save - LEAD_STEPS <= step:
            self._interval = [Order(layout="", verb="save", at=self._next_save, by="interval")]
            self._next_save = self._after(max(step, self._next_save))
        self._hear()
        self._await(step)
        self._take_promised(step)  # of what has just come
        while waiting := self._asked or self._saves_at(step):  # what somebody waits for goes first
            yield waiting.pop(0)

    def _take_promised(self, step: int) -> None:
        """What was promised for a later step, and has to be begun now, is asked for like all else."""
        soon = [order for order in self._promised if order.at - LEAD_STEPS <= step]
        self._promised = [order for order in self._promised if order not in soon]
        self._asked += sorted(soon, key=lambda order: order.at)

    def _hear(self) -> None:
        """Take what has been put up since the last time."""
        for number in range(self._seen, self._board.news()):
            text = self._board.read(number)
            if text is not None:
                order = self._order_of(json.loads(text), number)
                (self._asked if order.at < 0 else self._promised).append(order)
                self._expected.pop(order.request_id, None)
            self._seen = number + 1

    def _await(self, step: int) -> None:
        """Wait for what has to be begun now and is still with the agent; the other ranks wait in their next step.

        An agent whose run is asked to stop begins nothing more.
        """
        for request_id, expected in tuple(self._expected.items()):
            if expected.at - LEAD_STEPS > step:
                continue
            end = time.monotonic() + expected.patience
            while request_id in self._expected and not (self._stopping or expected.answered()):
                if time.monotonic() > end:
                    break
                time.sleep(_POLL_SECONDS)
                self._hear()
            self._expected.pop(request_id, None)

    @property
    def _stopping(self) -> bool:
        return any(order.verb == "stop" for order in self._asked)

    def _saves_at(self, step: int) -> list[Order]:
        """The save that is due by its interval, unless it would hold up a switch whose step was promised.

        One order is under way at a time. Such a save comes behind the switch.
        """
        begins = max([step + LEAD_STEPS, *(order.at for order in self._interval)])
        promised = [one.at for one in (*self._promised, *self._expected.values())]
        return [] if any(at - LEAD_STEPS <= begins for at in promised) else self._interval

    def answer(self, order: Order, outcome: str, message: str, switch: int | None = None) -> None:
        """Tell whoever asked what became of it."""
        if order.request >= 0:
            self._board.answer(order.request, json.dumps({"outcome": outcome, "message": message, "switch": switch}))

    def _order_of(self, record: Mapping[str, Any], number: int) -> Order:
        arguments = record.get("arguments", {})
        return Order(
            layout=arguments.get("layout", ""),
            members=tuple(arguments.get("members", ())),
            generation=arguments.get("generation", -1),
            mode=arguments.get("mode", self._mode),
            at=arguments.get("at", -1),
            verb=record["verb"],
            by=record.get("by", ""),
            request=number,
            request_id=record.get("id", ""),
            deadline=record.get("deadline"),
        )
