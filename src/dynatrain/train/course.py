"""The course of a job through its orders: switches, saves and the stop, one at a time, begun at step edges.

A switch inside a step is agreed on at the step's edge, as any other, and carried out where the loop comes to it.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from dynatrain.train.agreement import SwitchAbortedError, SwitchFailedError
from dynatrain.train.announcement import NotAdmittedError, announce
from dynatrain.train.attempt import Attempt
from dynatrain.train.order import Order
from dynatrain.train.parking import Parking
from dynatrain.train.party import Party
from dynatrain.train.passage import passage
from dynatrain.train.ready import Ready
from dynatrain.train.record import Recorder
from dynatrain.train.saver import Saver
from dynatrain.train.start import Start
from dynatrain.train.targets import Read
from dynatrain.train.travels import Travels
from dynatrain.train.turns import Turns
from dynatrain.train.updates import follow
from dynatrain.train.world import World

_LOG = logging.getLogger(__name__)


class Course:
    """Follows the orders of one job on one rank.

    Args:
        party: this rank.
        world: the first one.
        turns: gives the orders.
        saver: saves the job.
        read: reads a layout's text.
        recorder: keeps the books; None keeps none.
        parking: where the job's state is.
        save_at_stop: a job that is saved is also saved when it is stopped.

    Attributes:
        world: the present one.
        stopped: whether the job was asked to stop, and has.
        left: whether the run goes on without this rank.
        doomed: why the step under way is taken back; empty where it is not.
        pause: micro-batches of the step under way after which a switch is due; 0 for none.
        done: micro-batches that the step under way has behind it when it begins: it comes again from the place of a
            switch that was taken back.
        updated: whether the step under way has had its update.
        ready: the layout that was prepared ahead.
    """

    def __init__(
        self,
        party: Party,
        world: World,
        *,
        turns: Turns,
        saver: Saver,
        read: Read,
        recorder: Recorder | None,
        parking: Parking,
        save_at_stop: bool,
    ) -> None:
        self._party = party
        self._parking = parking
        self._travels = Travels(party, parking, turns)
        self._turns = turns
        self._saver = saver
        self._read = read
        self._recorder = recorder
        self._save_at_stop = save_at_stop
        self._order: Order | None = None
        self._attempt: Attempt | None = None
        self._start: Start | None = None
        self._abandoned: list[Attempt] = []
        self._settling = False
        self._edge = -1
        self._step = 0
        self._reason = ""  # why the last attempt was given up
        self._step_ended = time.perf_counter()
        self.world = world
        self.stopped = False
        self.left = False
        self.doomed = ""
        self.pause = 0
        self.done = 0
        self.updated = False
        self.ready = Ready(recorder)
        self._before = world
        self._wrap_optimizer(world)

    def edge(self, step: int) -> int:
        """A step edge: take back what is doomed, begin what all ranks have agreed to begin here.

        Args:
            step: the next step.

        Returns:
            The step that comes next.
        """
        self._come_to(step)
        self._go_on()
        return self._step

    def _come_to(self, step: int) -> None:
        self._edge += 1
        self._step = step
        self.updated = False
        if self.doomed:
            self._take_back()
        if self.pause:
            self._pass_over()
        self._free_abandoned()

    def _go_on(self) -> None:
        self._saver.look()
        if self._parking.parked:  # by the loop's own word: such a step trains nothing, and takes no order
            return
        if self._order is None:
            self._take_turn()
        if self._order is not None:
            self._advance(self._order)

    def step_ended(self) -> bool:
        """The loop's step is over; whether it counts, which a doomed one does not."""
        if self._settling:
            self._settle()
        self._step_ended = time.perf_counter()
        self.done = 0
        return not self.doomed

    def leave(self) -> None:
        """The loop was left, maybe inside a step: a switch that awaits its first update is decided without it."""
        if self._settling:
            self._settle()
        if self.doomed:
            self._take_back()

    def between(self) -> None:
        """Inside a step, behind the micro-batches that :attr:`pause` says: carry out the switch that is due."""
        assert self._attempt is not None
        self.pause = 0
        self._step_ended = time.perf_counter()
        self._begin(self._attempt)

    def _wrap_optimizer(self, world: World) -> None:
        """The first step after a switch decides it; where it is taken back, that step does nothing."""

        def step(make: Callable[[], Any]) -> Any:
            self._parking.require_here("optimizer.step")
            self._before_a_write()
            if self._settling:
                self._settle()
            return None if self.doomed else self._update(make)

        follow(world.optimizer, world.pending, step)

    def _before_a_write(self) -> None:
        """Return when nothing that is about to be written is still to be copied."""
        self._saver.before_a_write()

    def _update(self, make: Callable[[], Any]) -> Any:
        """Make the update of the step under way."""
        self.updated = True
        return make()

    def _take_turn(self) -> None:
        """Follow the next decision of what to do."""
        self._order = order = self._turns.take(self._edge, self._step)
        if order is None:
            return
        if self._recorder and order.verb != "save":
            self._recorder.announced(order, self._step)
        self._attempt = self._prepare(order)
        self._start = Start(self._party, order, self._attempt, lambda: self._saver.holds_up(order))

    def _prepare(self, order: Order) -> Attempt | None:
        """Begin to prepare a switch beside training, or go on with one that was; None where there is none."""
        if order.verb in {"save", "stop"}:
            return None
        size = len(order.members) or self._party.world_size
        target = self._read(order.layout, size) if order.builds else None
        attempt = self.ready.take(order, target, self.world)
        if attempt is not None or target is None or (order.verb == "prepare" and target == self.world.layout):
            return attempt
        way = passage(self._party, order)
        if way.crossing is not None and self._party.rank == 0:
            announce(self._party, order, self.world, way.party.board)
        attempt = Attempt(way=way, order=order, target=target, old=self.world)
        attempt.start()
        return attempt

    def _advance(self, order: Order) -> None:
        """Tell the others when this rank can begin; begin where all agreed to."""
        assert self._start is not None
        go = self._start.look(self._edge, self._step)
        # Gradients wait for a later step, equally on all ranks, which wait with them.
        if go is not None and 0 <= go.edge <= self._edge and self.world.pending.waits:
            go = self._start.starves(self._edge)
        if go is None or go.edge > self._edge:
            return
        self._start.done()
        self._order = None
        if self._attempt is not None and go.edge < 0:
            self._give_up(self._attempt, go.reason)
        elif go.edge < 0:
            self._turns.answer(order, "aborted", go.reason)
        elif order.verb == "prepare":
            attempt, self._attempt = self._attempt, None
            self._turns.answer(order, "done", self.ready.keep(attempt))
        elif self._attempt is not None:
            self._order = order
            self.pause = order.after
            if not self.pause:
                self._begin(self._attempt)
        elif order.verb == "save":
            self._saver.begin(self.world, self._step, order)
        elif order.verb == "park":
            self._park(order)
        else:
            self._stop(order)

    def _park(self, order: Order) -> None:
        """Leave the device until somebody wants the state back, or the job to stop."""
        stop = self._travels.obey(self.world, order, self._edge, self._step, self._step_ended)
        self._step_ended = time.perf_counter()
        if stop is not None:
            self._stop(stop)

    def travel(self, verb: str, step: int) -> None:
        """Park or unpark, by the loop's own word between two steps, on all ranks; what was to begin soon is given up.

        Args:
            verb: ``park`` or ``unpark``.
            step: the next one.

        Raises:
            SwitchAbortedError: it could not be done, and all is as it was; on every rank.
        """
        self.leave()
        self._saver.finish()
        if self.pause:
            raise SwitchAbortedError(f"a switch inside the step under way is due; {verb} behind it")
        # A stop stays: it is taken when the state is here.
        start = self._start if self._order is not None and self._order.verb != "stop" else None
        go = start.give_up(f"the loop does {verb}") if start is not None else None
        self._travels.agree(verb, goes=go is not None and go.edge >= 0)
        if self._order is not None and start is not None:
            self._advance(self._order)
        self.ready.give_up()
        self._travels.now(self.world, verb, step)
        self._step_ended = time.perf_counter()

    def _stop(self, order: Order) -> None:
        """End the loop at this edge, saved where the job is saved and nobody is in a hurry."""
        self.stopped = True
        self._saver.finish()
        wanted = self._save_at_stop and order.by != "SIGINT"  # Ctrl-C is a person who waits
        saved = self._save_now() if wanted else ""
        self._turns.answer(order, "done", f"stopped at step {self._step}, {saved or 'not saved'}")

    def _save_now(self) -> str:
        """Save the job as it stops, and wait for it; what became of it."""
        return self._saver.save_now(self.world, self._step)

    def _pass_over(self) -> None:
        """The step is over, and the loop has not come to the place inside it; likewise on all ranks."""
        assert self._attempt is not None
        place, self.pause = self.pause, 0
        asked = "which it does by Switcher.step_parts(micro-batches of the whole step)"
        self._give_up(self._attempt, f"the loop did not divide the step after {place} of its micro-batches, {asked}")

    def _give_up(self, attempt: Attempt, reason: str) -> None:
        self._abandoned.append(attempt)
        self._free_abandoned()
        self._finish(attempt, "aborted", reason)

    def _free_abandoned(self) -> None:
        """Free what attempts have made that were given up before they began, also those whose thread ended late."""
        running = [attempt for attempt in self._abandoned if not attempt.prepared]  # before: it may end meanwhile
        for attempt in self._abandoned:
            attempt.give_up()
        self._abandoned = running

    def _begin(self, attempt: Attempt) -> None:
        self._before_a_write()
        try:
            attempt.move(self._step, self._turns.books())
        except SwitchAbortedError as abort:
            self._finish(attempt, "aborted", str(abort))
            return
        except SwitchFailedError as failure:
            self._finish(attempt, "failed", str(failure))
            raise
        assert attempt.new is not None
        self._before, self.world = self.world, attempt.new
        if not attempt.way.comes:  # whose world this is already
            self._wrap_optimizer(self.world)
        attempt.seconds["stall"] = time.perf_counter() - self._step_ended
        self._settling = True
        attempt.start_check()
        if attempt.way.crossing is not None or self._party.early:
            self._settle()
            if self.doomed:
                self._take_back()

    def arrive(self, attempt: Attempt) -> int:
        """A newcomer's first edge: prepare, wait for the old ranks, and take part.

        Returns:
            The next step.

        Raises:
            NotAdmittedError: the crossing was given up.
        """
        attempt.start()
        edge = attempt.await_edge()
        self._step_ended = time.perf_counter()
        self._edge = edge - 1  # the same edge comes again, at which the old ranks are
        self._attempt = attempt
        self._begin(attempt)
        return attempt.step

    # The end of a switch.

    def _settle(self) -> None:
        attempt = self._attempt
        assert attempt is not None
        self._settling = False
        try:
            told = attempt.settle()
        except SwitchAbortedError as abort:
            self.doomed = str(abort)  # and the edge takes it back: until then the loop uses the new objects
        except SwitchFailedError as failure:
            self._finish(attempt, "failed", str(failure))
            raise
        else:
            if self._party.early:
                attempt.seconds["stall"] = time.perf_counter() - self._step_ended
            self._cross(attempt)
            self._finish(attempt, "committed", "", told)

    def _cross(self, attempt: Attempt) -> None:
        """After the commit of a crossing: everybody who is in the new world counts on in its numbers."""
        if attempt.way.crossing is None:
            return
        attempt.seconds["stall"] = time.perf_counter() - self._step_ended
        self.left = attempt.way.leaves
        if not self.left:
            self._turns.cross(attempt.order, attempt.books)
            self._saver.cross()
            self._travels.count = 0  # newcomers know of none
            if self._recorder:
                self._recorder.enter(self._party.board, self._party.rank, self._party.generation)

    def _take_back(self) -> None:
        """At the edge after an aborted commit: the old objects again, and the same step, or its rest, once more."""
        attempt, why = self._attempt, self.doomed
        assert attempt is not None
        self.doomed = ""
        try:
            attempt.undo(why)
        except SwitchFailedError as failure:
            self._finish(attempt, "failed", str(failure))
            raise
        self.world = self._before
        self.done = attempt.order.after
        self._finish(attempt, "aborted", why)

    def _finish(self, attempt: Attempt, outcome: str, reason: str, told: dict[int, Any] | None = None) -> None:
        self._attempt = self._order = self._start = None
        self._before, self._reason = self.world, reason
        attempt.finish()
        refused = attempt.way.comes and outcome == "aborted"
        if outcome != "committed" and self._party.rank == 0:
            _LOG.warning("switch %d to %s: %s: %s", attempt.order.number, attempt.order.layout, outcome, reason)
        if not (self.left or refused):
            self._note(attempt, outcome, reason, told or {})
        self._party.hook(outcome, -1, attempt.order.number)
        if refused:
            raise NotAdmittedError(reason)

    def _note(self, attempt: Attempt, outcome: str, reason: str, told: dict[int, Any]) -> None:
        """Write down how a switch has ended, and answer who asked for it."""
        order, step = attempt.order, attempt.step if attempt.way.comes else self._step
        if self._recorder and order.verb != "prepare":
            self._recorder.ended(attempt, outcome, reason, step, told)
        said, since = "done" if outcome == "committed" else outcome, f"{order.layout} since step {step}"
        self._turns.answer(order, said, reason or since, order.number)
