"""A run that loses members, without an agent: forked processes, and one that rings the alarm as an agent would."""

import os
import signal
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from tests import jobs, ranks
from tests.jobs import Asking, distance

from dynatrain.cluster.alarm import Alarm, put_up
from dynatrain.cluster.kernel import RANK_PRIORITY, take_realtime
from dynatrain.cluster.summons import Summons
from dynatrain.cluster.worlds import COMMIT, Worlds, crossing_board
from dynatrain.train import groups, trainer
from dynatrain.train.course import Course
from dynatrain.train.trainer import Trainer

PLACES = ("begin", "totals", "coupled", "updated")
"""Of a step: before its forward; before its last collective, behind it; behind its update. Others are phases of the
crossing by which a loss before is mended, ``connects``: all its members have come to make a group, and ``told``: it has
also told its address; ``parked``; ``stopping``: about to save for that; and ``over``: behind the loop."""


@dataclass(frozen=True)
class Fall:
    """What becomes of one member, and what follows.

    With ``denied``, those members take the step's last collective for broken, although they came through it. With
    ``behind``, it falls when that file is there.
    """

    member: int
    step: int
    place: str
    layout: str
    new: tuple[int, ...]
    by: str = "SIGKILL"
    denied: tuple[int, ...] = ()
    behind: Path | None = None


class Books(jobs.Books):
    """Keeps what became of every switch, and what each loss has cost."""

    def __init__(self):
        super().__init__()
        self.losses, self.kept_steps = [], []

    def enter(self, *where):
        pass

    def mended(self, number, loss, found, seconds):
        self.losses.append((number, loss.lost, found.told(1), seconds))

    def kept(self, note, keepers):
        self.kept_steps.append((note.step, note.seconds, keepers.sent_bytes))

    def saved(self, saved):
        pass


class Waiting(dist.Store):
    """A store in which a member falls when it has told what it has to tell, and waits for the others."""

    def __init__(self, store, plant):
        super().__init__()
        self.store, self.plant = store, plant

    def set(self, key, value):
        self.store.set(key, value)

    def wait(self, *_):
        self.plant.at(None, "told")


@dataclass
class Plant:
    """The faults of one member, as its loop comes to them."""

    store: dist.Store
    member: int
    falls: tuple[Fall, ...]
    done: set = field(default_factory=set)

    def at(self, step, place):
        for number, fall in enumerate(self.falls, 1):
            where = step if fall.place in PLACES else fall.step
            if number in self.done or (fall.step, fall.place) != (where, place):
                continue
            if fall.member == self.member:
                while fall.behind is not None and not fall.behind.exists():
                    time.sleep(0.01)
                self.store.set(f"fell/{number}", "")
                os.kill(os.getpid(), signal.Signals[fall.by])
                time.sleep(60)
            if self.member in fall.denied:
                self.done.add(number)
                raise RuntimeError("gloo: planted")


def survive(case, layout, size, falls, visits, seconds=100, beside=lambda *_: None, **more):
    """Train on ``size`` members that fall as told; what each saw, None of the fallen.

    ``beside(sw, step, found)`` is called behind each step.
    """

    def work(world):
        if world.rank == size:
            return _ring(world, size, falls)
        return _train(world, case, layout, size, falls, visits, beside, more)

    found = ranks.run(size + 1, work, seconds, silent={fall.member for fall in falls})
    return found[:size]


def _run_store(world):
    votes = dist.TCPStore("127.0.0.1", world.store.port, is_master=False, timeout=timedelta(seconds=20))
    return dist.PrefixStore("run", votes)


def _ring(world, size, falls):
    """What the leading agent does: see :mod:`dynatrain.cluster.lead`."""
    run, members, lost, last = _run_store(world), tuple(range(size)), (), None
    for number, fall in enumerate(falls, 1):
        while not world.store.check([f"fell/{number}"]):
            time.sleep(0.002)
        if last is not None:
            board = crossing_board(run, last.generation, last.holders)
            if "abort" not in board.decide(COMMIT, {"abort": "planted"}):
                members, lost = last.new, ()
        lost += (fall.member,)
        last = Summons(
            generation=number,
            old=members,
            new=fall.new,
            newcomers=(),
            layout=fall.layout,
            stage="asked",
            lost=lost,
            why=f"rank {members.index(fall.member)} was planted to fall",
        )
        put_up(run, last)
    return "rung"


def _train(world, case, layout, size, falls, visits, beside, more):
    take_realtime(RANK_PRIORITY)
    run = _run_store(world)
    worlds = Worlds(
        run=run,
        groups=dist.PrefixStore("groups", world.store),
        member=world.rank,
        rank=world.rank,
        world_size=size,
        alarm=Alarm(run, joins=False),
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("default", world.store),
        rank=world.rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    job, data, books = case.job(), Asking(case.data()), Books()
    plant = Plant(world.store, world.rank, falls)
    given = {"board": None, "store": None, "worlds": worlds, "recorder": books, "deadline": 30.0}
    given["hook"] = lambda event, _round, _switch: plant.at(None, event)
    sw = jobs.switcher(job, world, layout, **given | more)
    _patch(plant, sw, data)
    found = {"steps": [], "apart": [], "worlds": [], "began": []}

    def after(result):
        plant.at(result.step, "updated")
        found["steps"].append((result.step, result.loss, result.ids.tolist(), data.take()))
        if visits:
            found["apart"].append(distance(sw.world, sw.rank, visits[result.step]))
        found["worlds"].append(sw.layout.world_size)
        found["began"].append(time.monotonic())
        beside(sw, result.step, found)

    loop = Trainer(job, data, sw, after)
    while True:
        loop.run(case.steps)
        if sw.left or sw.stopped:
            break
        plant.at(None, "over")
        if "saves" in more:
            sw.save_now()
        if sw.meet():
            break
    if visits and not sw.left:
        found["end"] = distance(sw.world, sw.rank, visits[sw.step - 1])
    found |= {"step": sw.step, "stopped": sw.stopped, "saved": sw.saved}
    return found | {"left": sw.left, "switches": books.switches, "losses": books.losses, "kept": books.kept_steps}


def _patch(plant, sw, data):
    totals, step, named_group, save = trainer.step_totals, Trainer._step, groups.named_group, Course._save_now

    def planted_totals(*given, **more):
        plant.at(sw.step, "totals")
        result = totals(*given, **more)
        plant.at(sw.step, "coupled")
        return result

    def planted_step(self, number):
        data.take()  # of a step that was broken off
        plant.at(number, "begin")
        step(self, number)

    def planted_save(self):
        plant.at(None, "stopping")
        return save(self)

    def planted_group(name, members, me, backend, store, timeout):
        if not name.startswith("g0."):  # of the first world
            plant.at(None, "connects")
            if any((fall.member, fall.place) == (plant.member, "told") for fall in plant.falls):
                store = Waiting(store, plant)
        return named_group(name, members, me, backend, store, timeout)

    trainer.step_totals, Trainer._step, groups.named_group = planted_totals, planted_step, planted_group
    Course._save_now = planted_save
