"""A job's course where members may be lost, and what a loop needs of it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from dynatrain.cluster.worlds import forget_others
from dynatrain.train.agreement import SwitchAbortedError, exchange
from dynatrain.train.attempt import Attempt
from dynatrain.train.course import Course
from dynatrain.train.files import complete_steps
from dynatrain.train.gradients import forget
from dynatrain.train.keeping import Keeping, Keeps, Note
from dynatrain.train.mending import MendError, Mending
from dynatrain.train.muster import Stand
from dynatrain.train.order import Order
from dynatrain.train.parking import ParkedError
from dynatrain.train.party import Party
from dynatrain.train.survival import Survival
from dynatrain.train.world import World

T = TypeVar("T")


class SurvivingCourse(Course):
    """Follows the orders of one job on one rank, and after a loss goes over to the world of those that are left.

    Args:
        party: this rank.
        world: the first one.
        keeps: how snapshots are kept; None for not at all.
        **more: as of :class:`~dynatrain.train.course.Course`.

    Attributes:
        survival: this rank's way through losses.
    """

    def __init__(self, party: Party, world: World, *, keeps: Keeps | None, **more: Any) -> None:
        self.survival = Survival(party)
        self._keeps = keeps if keeps is not None and keeps.every and self.survival.on else None
        self._keeping: Keeping | None = None
        self._broken = False
        self._met = (0, 0)  # in which generation, and how often there, all ranks were met behind the loop
        super().__init__(party, world, **more)

    def edge(self, step: int) -> int:
        """As of the base class; what is lost is mended first, and may have thrown the run back to an earlier step."""
        self._come_to(step)
        self._mend_all()
        if not self.left:
            self._go_on()
        if not (self.left or self.stopped):
            self.survival.begin(self._step, self.world)
            self._keep()
        return self._step

    def meet(self, step: int) -> int:
        """Behind the loop: meet all ranks of the world, or go over to what is left of it.

        Args:
            step: the next one.

        Returns:
            -1 where all are here; else the step that comes next, for those that are left.

        Raises:
            SwitchAbortedError: a rank did not come, and no loss is told that says why.
            MendError: what is left cannot go on.
        """
        party, (generation, met) = self._party, self._met
        met = met if generation == party.generation else 0
        self._met = party.generation, met + 1
        try:
            exchange(party.board, f"end/{met}", party.rank, payload=None, timeout=party.groups.timeout_seconds)
        except SwitchAbortedError:
            if not self.survival.told():
                raise
            self._come_to(step)
            self._mend_all()
            return self._step
        return -1

    def _park(self, order: Order) -> None:
        """As of the base class. Where a member is lost meanwhile, the others bring the state back, and stop saved.

        Raises:
            MendError: it cannot come back, or is not to be saved.
        """
        super()._park(order)
        mending = self.survival.mending
        if mending is None or not self._parking.parked:
            return
        said = f"{mending.loss.why}; and the state of those that are left is parked"
        if not (self._save_at_stop and self._saver.on):
            raise MendError(f"{said}, in a run that is not saved when it is stopped")
        try:
            self._parking.bring_back()
        except (ParkedError, RuntimeError) as error:
            raise MendError(f"{said}, and cannot come back: {error}") from error
        self._mend_all()
        if not self.left:
            self._stop(replace(order, verb="stop", by="loss", request=-1))

    def _mend_all(self) -> None:
        while not self.left and (mending := self.survival.mending) is not None:
            self._mend(mending)

    def _keep(self) -> None:
        """Take a snapshot where one is due; not of a layout that may still be taken back."""
        if self._keeps is None or self._settling:
            return
        if self._keeping is None or self._keeping.world is not self.world:
            if self._keeping is not None:
                self._keeping.end()
            told = self._recorder.kept if self._recorder else lambda _note, _keepers: None
            self._keeping = Keeping(self._party, self.world, self._keeps, self._turns.switches, told)
        self._keeping.edge(self._edge, self._step)

    @property
    def _notes(self) -> tuple[Note, ...]:
        return self._keeping.notes if self._keeping is not None else ()

    def _before_a_write(self) -> None:
        super()._before_a_write()
        if self._keeping is not None:
            self._keeping.before_a_write()

    def step_ended(self) -> bool:
        """The loop's step is over; whether it counts, which one that was broken off before its update does not."""
        counts, broken = super().step_ended(), self._broken
        self._broken = False
        return counts and (self.updated or not broken)

    def broken_by(self, error: Exception) -> bool:
        """Whether the step under way is broken by a loss, and not by a mistake of the loop's own."""
        self._broken = self.survival.broken_by(error)
        return self._broken

    def couple(self, step: int, work: Callable[[], T]) -> T:
        """See :meth:`Survivable.couple`."""
        return self.survival.couple(step, work)

    def _update(self, make: Callable[[], Any]) -> Any:
        self.survival.couple_alone(self._step)
        self.survival.torn = True
        done = super()._update(make)
        self.survival.torn = False
        return done

    def _mend(self, mending: Mending) -> None:
        """Cross to what is left of the world, or return because there is another loss.

        Raises:
            MendError: what is left cannot go on.
        """
        if self._parking.parked:
            raise MendError(f"{mending.loss.why}; and the loop has parked the state of those that are left")
        self._drop_all(mending.loss.why)
        self.survival.muster()
        if mending is not self.survival.mending:
            return
        self.survival.take_back(self._step, self.world)
        try:
            attempt = self._agree(mending)
            mending.prepare(attempt)
        except SwitchAbortedError as abort:
            if self._attempt is not None:
                self._give_up(self._attempt, str(abort))
            self.survival.await_next(mending, str(abort))
            return
        self._begin(attempt)
        if self._recorder and self._party.generation == mending.loss.generation:
            assert mending.found is not None
            self._recorder.mended(attempt.order.number, mending.loss, mending.found, time.monotonic() - mending.began)
        if not self.left and self._party.generation != mending.loss.generation:
            self.survival.await_next(mending, self._reason)

    def _drop_all(self, why: str) -> None:
        """What is under way among all members is not any more."""
        if self._attempt is not None:
            self._give_up(self._attempt, why)
        elif self._order is not None:
            self._turns.answer(self._order, "aborted", why)
        self._order = self._start = None
        self.ready.give_up()
        self._saver.give_up(why)
        if self._keeping is not None:
            self._keeping.give_up()
        self.pause = self.done = 0
        forget(self._party, self.world)

    def _agree(self, mending: Mending) -> Attempt:
        """The crossing that all survivors agree on, not yet begun."""
        turns = self._turns
        mine = Stand(
            step=self._step,
            torn=self.survival.torn,
            edge=self._edge,
            turn=turns.turn,
            switches=turns.switches,
            files=complete_steps(self._saver.root),
            notes=tuple((note.step, note.own_whole, tuple(note.wards), note.wards_whole) for note in self._notes),
        )
        stands = mending.stand(mine)
        found = mending.restore(self.world, stands)
        order = self._order = mending.order(stands)
        self._step, self._edge = found.loss.step, max(stand.edge for stand in stands)
        target = self._read(order.layout, len(order.members))
        attempt = self._attempt = mending.attempt(self.world, target, order, found, self._saver.root, self._notes)
        if mending.number == 0:
            assert self._party.worlds is not None
            forget_others(self._party.worlds.run, self._party.generation, order.generation)
            turns.inherit(self._step)
        return attempt


class Survivable:
    """What a loop needs of its ``Switcher`` so that it goes on where members of its world are lost.

    Attributes:
        step: the step under way, or the next one.
    """

    step: int
    _course: SurvivingCourse

    @contextmanager
    def survivable(self) -> Iterator[None]:
        """Around the body of the loop: where members of the world are lost, the step is left, and the loop goes on.

            for step in sw.steps(until=1000):
                with sw.survivable():
                    train_step(sw.model, sw.optimizer, batch(step))

        At the next edge the run goes over to those that are left. A step that was broken off before its update comes
        again: what the body writes before the update, other than gradients, buffers and random streams, it writes
        twice. Behind the update it is to talk to no other rank, or may miss what it had to say there. Needs dynatrain's
        agent; else, and for every error that no loss is behind, this does nothing.

        Raises:
            Exception: of the body.
        """
        try:
            yield
        except Exception as error:
            if not self._course.broken_by(error):
                raise

    def meet(self) -> bool:
        """Behind the loop: whether all ranks have come here; else members are lost, and those that are left go on.

        They do again what came behind the loop, a save for example, and first the steps from :attr:`step` on, where
        that is an earlier one. Needs dynatrain's agent.

        Raises:
            MendError: what is left cannot go on.
            SwitchAbortedError: a rank did not come.
        """
        step = self._course.meet(self.step)
        self.step = self.step if step < 0 else step
        return step < 0

    def couple(self, work: Callable[[], T]) -> T:
        """Name the last collective of a step before its update: one that couples all ranks, as the norm's all-reduce.

        A loop that names none gets one of a single element, in ``sw.optimizer.step()``. Why it matters is told in
        :mod:`dynatrain.train.muster`.

        Args:
            work: the collective; what it gives is equal on all ranks, and can be said in JSON.

        Returns:
            What ``work()`` gave, here or, where a loss has broken it here, on another rank.

        Raises:
            WorldLostError: it is broken on all ranks; :meth:`survivable` takes it.
        """
        return self._course.couple(self.step, work)
