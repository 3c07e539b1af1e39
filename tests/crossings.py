"""A run whose members come and go, without an agent: forked processes, each told what an agent would tell it."""

import contextlib
import gc
import hashlib
import json
import os
import time
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from tests import jobs, ranks
from tests.jobs import SHAPE, Asking, Case, distance
from tests.ledgers import registered_groups

from dynatrain.cluster.kernel import RANK_PRIORITY, take_realtime
from dynatrain.cluster.worlds import Worlds
from dynatrain.train.announcement import NotAdmittedError
from dynatrain.train.record import Recorder
from dynatrain.train.torch_private import local_tensor
from dynatrain.train.trainer import Trainer

PATIENCE = 20.0
"""Seconds for which the old world stands still while the next one is prepared: else hundreds of steps would pass, which
the oracle had to do, too."""

SHALLOW = replace(SHAPE, num_hidden_layers=2)
"""A model for tests that no pipeline stages need."""

STEPS_EACH = 3
"""Steps in a world before the next one is asked for."""


@dataclass(frozen=True)
class Stop:
    """A world: its layout, its members by rank, and how it is reached."""

    layout: str
    members: tuple[int, ...]
    mode: str = "keep"


class DoneError(Exception):
    """The tour is over."""


class Ema:
    """A moving average of every parameter."""

    KEEP = 0.75

    def __init__(self, sw):
        self.sw = sw
        self.held = {name: entry.value.detach().clone() for name, entry in sw.world.found.items()}
        self.taken = 0

    def follow(self):
        for name, entry in self.sw.world.found.items():
            held, value = local_tensor(self.held[name]), local_tensor(entry.value)
            held.mul_(self.KEEP).add_(value, alpha=1 - self.KEEP)
        self.taken += 1

    def state_dict(self):
        return {"shadow": dict(self.held), "taken": self.taken}

    def load_state_dict(self, state):
        self.held, self.taken = dict(state["shadow"]), state["taken"]


class Books(jobs.Books):
    """Keeps what became of every switch; and, in a run folder, the real books, too."""

    def __init__(self, folder, worlds):
        super().__init__()
        self.real = folder and Recorder(
            folder, worlds.board(), rank=worlds.rank, generation=worlds.generation, attempt=0, rates=None
        )

    def enter(self, *where):
        if self.real:
            self.real.enter(*where)

    def step_ended(self, now):
        if self.real:
            self.real.step_ended(now)

    def ended(self, *what):
        super().ended(*what)
        if self.real:
            self.real.ended(*what)


def worlds_of(world, stops, member):
    """What an agent tells a member: of the first world that has it."""
    generation = next(number for number, stop in enumerate(stops) if member in stop.members)
    members = stops[generation].members
    votes = dist.TCPStore("127.0.0.1", world.store.port, is_master=False, timeout=timedelta(seconds=20))
    return Worlds(
        run=dist.PrefixStore("run", votes),
        groups=dist.PrefixStore("groups", world.store),
        member=member,
        rank=members.index(member),
        world_size=len(members),
        generation=generation,
        joins=generation > 0,
    )


class Member:
    """One process of the tour, and what it saw: at every step, state by state, how far it is from the oracle."""

    def __init__(self, world, case, stops, visits, folder=None, **more):
        take_realtime(RANK_PRIORITY)
        self.member, self.store, self.stops = world.rank, world.store, stops
        self.visits, self.steps = visits, case.steps
        self.worlds = worlds_of(world, stops, world.rank)
        if not self.worlds.joins:
            store = dist.PrefixStore("default", world.store)
            dist.init_process_group(
                "gloo", store=store, rank=world.rank, world_size=len(stops[0].members), timeout=timedelta(seconds=60)
            )
        self.books = Books(folder, self.worlds)
        self.found = {"steps": [], "apart": [], "bits": [], "generations": [], "books": []}
        self.begin(world, case, **more)
        self.in_world, self.seen_generation, self.asked = 0, self.sw.generation, {self.sw.generation}

    def begin(self, world, case, **more):
        """Make the job and its ``Switcher``."""
        self.job, self.data = case.job(), Asking(case.data())
        given = {"board": None, "store": None, "worlds": self.worlds, "recorder": self.books, "deadline": 15.0}
        self.sw = jobs.switcher(self.job, world, self.stops[self.worlds.generation].layout, **given | more)
        self.ema = self.sw.register("ema", Ema(self.sw))

    def run(self):
        """Train to the end of the tour, or of this member's part in it."""
        with contextlib.suppress(DoneError):
            Trainer(self.job, self.data, self.sw, self.after).run(self.steps)
        return self.found | {"left": self.sw.left, "switches": self.books.switches}

    def after(self, result):
        self.ema.follow()
        self.note()
        step = (result.step, result.loss, result.grad_norm, result.lr, result.ids.tolist(), self.data.take())
        self.found["steps"].append(step)
        self.found["generations"].append(self.sw.generation)
        self.found["bits"].append(bits(self.sw.world))
        if self.visits:
            self.found["apart"].append(distance(self.sw.world, self.sw.rank, self.visits[result.step]))
        self.go_on()

    def note(self):
        """A step is made: how many there were in this world?"""
        if self.sw.generation != self.seen_generation:
            self.seen_generation, self.in_world = self.sw.generation, 0
        self.in_world += 1

    def go_on(self):
        """Ask for the next world, as an agent would, where there is one."""
        if self.in_world < STEPS_EACH:
            return
        if self.in_world == STEPS_EACH:
            self.found["books"].append(self.ledger())
        coming = self.sw.generation + 1
        if coming == len(self.stops):
            raise DoneError
        self.ask(coming)

    def ledger(self):
        """What must not grow from world to world; what was left of the last one is a cycle."""
        gc.collect()
        return {
            "groups": registered_groups(),
            "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
            "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
            "keys": self.store.num_keys(),
            "held": self.sw._party.memory.held,
        }

    def ask(self, generation):
        """One word of rank 0; then all wait until the next world is prepared, here and by the newcomers."""
        if self.sw.rank == 0 and generation not in self.asked:
            stop, asked = self.stops[generation], self.worlds.requests.news()
            if asked:
                self.worlds.requests.take_answer(asked - 1)
            arguments = {"layout": stop.layout, "members": stop.members, "generation": generation, "mode": stop.mode}
            self.worlds.requests.publish(json.dumps({"verb": "scale", "by": "test", "arguments": arguments}))
        self.asked.add(generation)
        if (attempt := self.sw._course._attempt) is not None:
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end and not over(attempt, generation):
                time.sleep(0.01)


def over(attempt, generation):
    """Whether nothing is gained by standing still: prepared here and by the newcomers, or given up somewhere."""
    ready = attempt.prepared and (attempt.problem or not attempt.way.cold())
    return ready or attempt.way.gate.go_edge(generation) is not None


def bits(world):
    """A hash of everything that this rank holds."""
    found = hashlib.sha256()
    for key, value in sorted(world.values().items()):
        found.update(repr(key).encode() + bytes(memoryview(value.detach().contiguous().view(-1).clone().numpy())))
    return found.hexdigest()


def case_of(steps, **more):
    """A run of at most so many steps, the oracle's state known after each."""
    return Case(tour=("",) * steps, steps_each=1, **{"micro_batches": 4, "samples": 84} | more)


def expected(case):
    """The oracle's losses and states after each step, with the moving average that the members keep."""
    losses, visits = jobs.expected(case)
    kinds = [key for key in visits[0] if key[1] == "param"]
    start = jobs.beginning(case)
    average = {name: start[name].clone() for name, _ in kinds}
    for visit in visits:
        for name, _ in kinds:
            average[name] = Ema.KEEP * average[name] + (1 - Ema.KEEP) * visit[name, "param"]
            visit[name, "ema.shadow"] = average[name].clone()
    return losses, visits


def travel(case, stops, visits, seconds=90, member=Member, size=0, **more):
    """The tour on forked processes, one for each member; what each saw."""

    def work(world):
        try:
            return member(world, case, stops, visits, **more).run()
        except NotAdmittedError as refused:
            return {"refused": str(refused)}

    return ranks.run(size or 1 + max(max(stop.members) for stop in stops), work, seconds)
