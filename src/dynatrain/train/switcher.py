"""``Switcher``: a training loop whose layout can change at every step edge.

    sw = Switcher(build, layout="fsdp4", state={"ema": ema, "sched": make_sched})
    for step in sw.steps(until=1000):
        loss = train_step(sw.model, sw.optimizer, batch(step))

A step that accumulates gradients over micro-batches can also be switched between two of them:

    for step in sw.steps(until=1000):
        for part in sw.step_parts(8):    # mostly range(0, 8) alone
            for micro_batch in part:
                accumulate(sw.model, micro_batch)
        update(sw.optimizer)

Several jobs in one process, each with a name of its own, go through their steps together:

    promise = Promise(24 << 30)
    actor = Switcher(build_actor, name="actor", layout="fsdp4", promise=promise)
    reference = Switcher(build_reference, name="reference", layout="tp4", promise=promise)  # build gives (model, None)
    for step, _ in zip(actor.steps(until=1000), reference.steps(until=1000), strict=True):
        ...

They switch one after the other, and before the first step in the new layout: the update of one could not be taken back
without those of the others. What trains nothing hears of an order at an edge of its own steps, as everything here: so
it is stepped beside something whose steps couple all ranks.

The loop asks ``sw`` for its handles in each step; what it kept from before a switch raises, with its name. The built-in
trainer is an ordinary user of this class.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dynatrain.cluster.board import Board
from dynatrain.cluster.worlds import Worlds
from dynatrain.execute.pieces import Pool
from dynatrain.execute.promise import Promise
from dynatrain.models.names import NameRule, strip_wrappers
from dynatrain.train.agreement import on_every_rank
from dynatrain.train.arrival import arrive
from dynatrain.train.asking import Asking
from dynatrain.train.blueprint import check_mode
from dynatrain.train.copies import UnequalCopies, check_policy
from dynatrain.train.first import Initial, blank, first_world, hold, join, register
from dynatrain.train.handles import Handles
from dynatrain.train.install import survey
from dynatrain.train.keeping import Keeps
from dynatrain.train.lends import Lends
from dynatrain.train.loading import Rename, load
from dynatrain.train.own_folder import recorder_in
from dynatrain.train.parking import ParkedError, Parking
from dynatrain.train.party import DataParallel
from dynatrain.train.publisher import Publisher
from dynatrain.train.publishes import Publishes
from dynatrain.train.record import Recorder
from dynatrain.train.saver import Saved, Saver, SavingError
from dynatrain.train.saving import Saves
from dynatrain.train.segments import Fused, Segments
from dynatrain.train.standing import standing
from dynatrain.train.surviving import Survivable, SurvivingCourse
from dynatrain.train.targets import Read, same_meaning, served, whole_world
from dynatrain.train.turns import Turns
from dynatrain.train.wishes import Wishes
from dynatrain.train.world import Build, World


class Switcher(Asking, Survivable, Lends, Publishes, Handles):
    """Holds one training job's model and optimizer, and changes their layout while it trains.

    Needs an initialised default process group (torchrun, or dynatrain's own agent).

    Args:
        build: see :data:`dynatrain.train.world.Build`.
        layout: first layout, as text; its product is the world size.
        state: what else belongs to the job: objects with ``state_dict``, and factories ``optimizer -> scheduler``.
        initial: fills a first build on meta; None where the first ``build`` makes real tensors.
        names: rule of canonical names; needed where one tensor has different paths in different parts.
        segments: fused modules, see :data:`dynatrain.train.segments.Fused`.
        padded: ``{module or parameter: real rows}`` of tensors whose dim 0 ``build`` pads, in each layout as it likes.
        sharded: ``{module or parameter: dim}`` of plain tensors that ``build`` makes as this tp rank's equal part.
        mode: ``keep``, ``tight``, or ``auto`` (keep where it fits).
        deadline: seconds that each phase of a switch may take.
        budget: bytes above max(old, new) in ``tight``; 0 for the least that suffices.
        unequal_copies: what becomes of copies that differ before a switch: ``refuse`` it, or ``owner``: all get what
            the first of them holds, which the certificate counts; old copies are then compared inside the stall.
        schedule: ``{step: layout}``: first step in that layout.
        inside: ``{step: micro-batches}``: of the scheduled switches those that come inside their step, behind so many.
        board: where ranks agree; made over the default group's store where it is None.
        store: for process groups; likewise.
        worlds: in place of both, where members come and go: dynatrain's agent tells it. A newcomer's constructor waits
            for its crossing, makes the default group and a world in the layout to come, its values blank where there
            is ``initial``; its first :meth:`steps` takes part in the crossing.
        recorder: writes events and certificates; None writes nothing, unless
        folder: is given, where they are written then, for ``dynatrain history``, ``events`` and ``check``: a
            run's, which is made where it is not there, and gone on with where it is.
        legal: ``legal(text, world_size)`` reads a layout's text, or refuses it; None checks the world size alone.
        device: where state lies; by default this process's CUDA device where the default group is NCCL's, else the CPU.
        memory: where its memory comes from; made where it is None.
        name: of one job of several in this process (an actor, a critic, a reference), each a ``Switcher`` of its own;
            the module's text tells how they are stepped. Equal on all ranks.
        promise: the most bytes of state that all jobs to which it is given hold together.
        data_parallel: ``free`` where the loop cuts one global batch into equal shares by ``layout.data_ranks``; ``own``
            where it also reduces gradients itself; with ``fixed``, one that FSDP2 averages for keeps its data ranks.
        saves: where and when the job is saved; None for never.
        keeps: how often snapshots are taken against losses; None for never.
        save_at_stop: also when it is stopped.
        on_saved: told of every save that has ended, well or not.
        switches_before: how many the run has had before; the next one's number counts from there.
        **more: further attributes of :class:`dynatrain.train.party.Party`.

    Raises:
        LayoutError: the text is no layout, or not of this world size.
        NotAdmittedError: of a newcomer: its crossing was given up.
        UnplacedTensorError, UnknownStateError, SegmentError: what could not be switched, all of it, by name.
        StartRefusedError: likewise, where ranks differ in what they refuse: on every rank, with the ranks' numbers.
        PromiseError: the jobs of this process hold more than was promised.
        NameTakenError: this process has, or had, a job of this name.
        ArgumentError: there is no such mode, or policy, or the schedule cannot be kept.
    """

    def __init__(
        self,
        build: Build,
        *,
        layout: str,
        state: Mapping[str, Any] | None = None,
        initial: Initial | None = None,
        names: NameRule = strip_wrappers,
        segments: Fused | None = None,
        padded: Mapping[str, int] | None = None,
        sharded: Mapping[str, int] | None = None,
        mode: str = "auto",
        deadline: float = 60.0,
        budget: int = 0,
        unequal_copies: UnequalCopies = "refuse",
        schedule: Mapping[int, str] | None = None,
        inside: Mapping[int, int] | None = None,
        board: Board | None = None,
        store: dist.Store | None = None,
        worlds: Worlds | None = None,
        recorder: Recorder | None = None,
        folder: Path | str = "",
        legal: Read | None = None,
        data_parallel: DataParallel = "fixed",
        device: torch.device | None = None,
        memory: Pool | None = None,
        name: str = "",
        promise: Promise | None = None,
        saves: Saves | None = None,
        keeps: Keeps | None = None,
        save_at_stop: bool = True,
        on_saved: Callable[[Saved], None] = lambda _saved: None,
        switches_before: int = 0,
        **more: Any,
    ) -> None:
        check_mode(mode)
        check_policy(unequal_copies)
        self._party = party = standing(
            *(worlds, board, store, device, memory),
            name=name,
            promise=promise,
            build=build,
            names=names,
            segments=Segments(segments or {}, padded or {}, sharded or {}),
            deadline=deadline,
            budget=budget,
            unequal_copies=unequal_copies,
            data_parallel=data_parallel,
            **more,
        )
        if folder:
            recorder, switches_before = recorder_in(party, Path(folder), layout, recorder)
        self._recorder = recorder
        self._loads, self._inside, self.step = 0, False, 0
        read = legal or whole_world
        arrival = self._arrival = arrive(party) if worlds and worlds.joins else None
        made, first, fill = party.groups, layout, initial
        if arrival:
            made, first, fill = arrival.way.made, arrival.told.order.layout, initial and blank

        def begin() -> World:
            world = first_world(party, made, read(first, party.world_size), fill)
            self._read = served(same_meaning(read, world, data_parallel), lambda: self.world)
            party.early = party.early or not world.trains
            for label, thing in (state or {}).items():
                join(party, world, label, thing)
            return world

        try:
            world = begin() if arrival else on_every_rank(party.board, "start", party.rank, begin, timeout=deadline)
            self._publisher = Publisher(party)
            self._saver = Saver(party, saves, (self._answer_saved, on_saved), self._publisher)
            wishes = Wishes(party.requests, schedule or {}, mode, self._saver.every, inside or {})
            parking = self._parking = Parking(party, recorder)
            self._turns = Turns(
                *(party, wishes, self._read, lambda: self.layout, self._saver, parking, switches_before),
                refused=lambda *told: recorder.refused(*told) if recorder else None,
            )
            self._course = SurvivingCourse(
                party,
                world,
                turns=self._turns,
                saver=self._saver,
                read=self._read,
                recorder=recorder,
                parking=parking,
                save_at_stop=save_at_stop,
                keeps=keeps,
            )
            if arrival:
                return  # what the job holds, the crossing tells
            for text in (layout, *(schedule or {}).values()):
                self._read(text, party.world_size)
            survey(party, world, "survey")
            hold(party, world)
        except Exception as error:
            self.close()
            if arrival:
                arrival.fail(error)
            raise

    def steps(self, until: int) -> Iterator[int]:
        """Step numbers from the present one to ``until - 1``; requests are taken at each edge.

        A step whose switch was aborted at its commit is given out a second time, in the old layout. A rank without
        which the run goes on gets no more: see :attr:`left`.

        Raises:
            NotAdmittedError: of a newcomer: its crossing was given up.
        """
        if self._arrival:
            self.step = self._course.arrive(self._arrival.attempt(self.world, self.layout))
            self._arrival = None
        self._course.survival.arm()
        while self.step < until:
            self.step = self._course.edge(self.step)
            if self.stopped or self.left:
                return
            began, self._inside = time.perf_counter(), True
            try:
                yield self.step
            except GeneratorExit:  # the loop was left: behind its update the step is made
                self.step += self._course.updated
                raise
            finally:
                self._inside = False
            self.step += self._course.step_ended()
            self._party.note_step(time.perf_counter() - began)
            if self._recorder:
                self._recorder.step_ended(time.perf_counter())

    def step_parts(self, num_micro_batches: int) -> Iterator[range]:
        """The parts of the step under way, as numbers of micro-batches of the global batch; mostly one, the whole step.

        Where a switch inside the step is due, it is carried out between two parts: the next one is for the data ranks
        of the new layout. When a part ends, ``.grad`` of every trained parameter is to be its reduced sum over the
        parts so far, equal in all copies, and so are counters in buffers. The next part finds it in ``.grad`` of the
        new parameters. A step that comes again after such a switch was aborted begins with the part behind it, and
        finds in ``.grad`` what the parts before had accumulated.

        Args:
            num_micro_batches: of the whole step, over all data ranks.
        """
        begin, pause = self._course.done, self._course.pause
        if begin < pause < num_micro_batches:
            yield range(begin, pause)
            self._course.between()
            begin = pause
        yield range(begin, num_micro_batches)

    def register(self, label: str, thing: Any) -> Any:
        """Add what could not be made before the first build, such as an average of ``sw.model``.

        All ranks call it, between two steps and while no switch is under way.

        Args:
            label: a new name.
            thing: as in the constructor's ``state``.

        Returns:
            ``thing``, or what the factory made; after a switch take a factory's product from ``state``.

        Raises:
            UnknownStateError, StartRefusedError: it could not be carried to another layout, by name.
        """
        self._parking.require_here("register")
        self._course.ready.give_up()
        if self._arrival:  # the others are not there yet
            join(self._party, self.world, label, thing)
        else:
            register(self._party, self.world, label, thing)
        return self.world.objects[label]

    def save(self, *, by: str = "program") -> None:
        """Ask, from the loop, to be saved at the next step edge, beside training. All ranks may call.

        Raises:
            SavingError: the job has no place to be saved to.
        """
        self._saver.require()
        self._turns.ask_save(by=by)

    def save_now(self) -> str:
        """Save, and return when it is done. All ranks call it: behind the loop, or before or behind a whole step in it.

        Returns:
            What became of it, for people.

        Raises:
            SavingError: the job has no place to be saved to, or the step under way has begun and not been made.
        """
        self._saver.require()
        self._parking.require_here("save_now")
        if self._inside and self.world.pending.waits:
            raise SavingError(
                f"step {self.step} is under way: save_now comes before its first forward or behind its update"
            )
        self._course.leave()
        self._saver.finish()
        return self._saver.save_now(self.world, self._next_step)

    def park(self) -> None:
        """Bring all state to host memory, so that something else can have the device, and return when it is free.

        All ranks call it: before the first step, or before or behind a whole step in the loop. Parameters, optimizer
        state, buffers, and what registered objects hold of them leave; handles stay, and every use of one raises until
        :meth:`unpark`. Again is nothing. The edges of a parked job's steps pass without orders. A switch or save that
        was to begin is given up.

        Raises:
            SwitchAbortedError: it could not be done, for want of host memory for example, and all is as it was; on
                every rank.
            ParkedError: the step under way has begun and not been made.
        """
        self._travel("park")

    def unpark(self) -> None:
        """Bring the state back under the same handles, bit by bit; as :meth:`park`.

        Raises:
            SwitchAbortedError: something else has the device's memory still, or the promise of this process leaves no
                room; the state is parked as before.
        """
        self._travel("unpark")

    def _travel(self, verb: str) -> None:
        if self._inside and not self._parking.parked and self.world.pending.waits:
            raise ParkedError(f"step {self.step} is under way: {verb} before its first forward or behind its update")
        self._course.travel(verb, self._next_step)

    def load(self, path: Path, *, rename: Rename | None = None) -> int:
        """Go on from a checkpoint, in whatever layout it was written; before the first step. All ranks call it.

        Overwrites, in place, the model, the optimizer's state, what is registered, this rank's random streams and the
        step. Register before what was registered when it was saved.

        Args:
            path: a checkpoint of ours, or a folder of PyTorch's distributed checkpoint (DCP) of somebody else's, from
                which tensors are taken and the step is 0. Where ours says that it has weights only, those are taken.
            rename: from our keys (``model.NAME``, ``optim.state.NAME.exp_avg``) to those of somebody else's folder.

        Returns:
            The next step.

        Raises:
            SwitchAbortedError: it cannot be loaded, with everything that is missing, left over or damaged, by name.
        """
        self._parking.require_here("load")
        self._loads += 1
        self.step = load(self._party, self.world, path, f"load/{self._loads}", rename)
        self._turns.begun(self.step)
        return self.step

    def _answer_saved(self, saved: Saved) -> None:
        if saved.order is not None:
            self._turns.answer(saved.order, saved.outcome, saved.message)

    def close(self) -> None:
        """Destroy the process groups that this object made."""
        self._party.groups.close()
        if self._party.memory.promise is not None:
            self._party.memory.promise.end_turn(self._party.memory)
