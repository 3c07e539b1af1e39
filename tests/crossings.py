"""A run whose members come and go, without an agent: forked processes, each told what an agent would tell it."""

import contextlib
import json
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from tests import jobs, ranks
from tests.jobs import Asking, Case, distance
from tests.ledgers import registered_groups

from dynatrain.cluster.kernel import RANK_PRIORITY, take_realtime
from dynatrain.cluster.worlds import Worlds
from dynatrain.train.announcement import NotAdmittedError
from dynatrain.train.torch_private import local_tensor
from dynatrain.train.trainer import Trainer

PATIENCE = 20.0
"""Seconds for which the old world stands still while the next one is prepared: else hundreds of steps would pass, which
the oracle had to do, too."""

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
    """Also of other worlds."""

    def enter(self, board, rank, generation):
        pass


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
    """One process of the tour, and what it saw."""

    def __init__(self, world, case, stops, visits, **more):
        take_realtime(RANK_PRIORITY)
        self.stops, self.visits = stops, visits
        self.worlds = worlds_of(world, stops, world.rank)
        if not self.worlds.joins:
            store = dist.PrefixStore("default", world.store)
            dist.init_process_group(
                "gloo", store=store, rank=world.rank, world_size=len(stops[0].members), timeout=timedelta(seconds=60)
            )
        self.job, self.data, self.books = case.job(), Asking(case.data()), Books()
        given = {"board": None, "store": None, "worlds": self.worlds, "recorder": self.books, "deadline": 15.0}
        self.sw = jobs.switcher(self.job, world, stops[self.worlds.generation].layout, **given | more)
        self.ema = self.sw.register("ema", Ema(self.sw))
        self.found = {"steps": [], "apart": [], "generations": [], "answers": []}
        self.in_world, self.seen_generation, self.asked = 0, self.sw.generation, {self.sw.generation}

    def run(self):
        """Train to the end of the tour, or of this member's part in it."""
        with contextlib.suppress(DoneError):
            Trainer(self.job, self.data, self.sw, self.after).run(len(self.visits))
        return self.found | {"left": self.sw.left, "switches": self.books.switches, "groups": registered_groups()}

    def after(self, result):
        self.ema.follow()
        if self.sw.generation != self.seen_generation:
            self.seen_generation, self.in_world = self.sw.generation, 0
        self.in_world += 1
        step = (result.step, result.loss, result.grad_norm, result.lr, result.ids.tolist(), self.data.take())
        self.found["steps"].append(step)
        self.found["generations"].append(self.sw.generation)
        self.found["apart"].append(distance(self.sw.world, self.sw.rank, self.visits[result.step]))
        if self.in_world >= STEPS_EACH:
            self.go_on()

    def go_on(self):
        """Ask for the next world, as an agent would, where there is one."""
        coming = self.sw.generation + 1
        if coming == len(self.stops):
            raise DoneError
        if self.sw.rank == 0 and coming not in self.asked:
            self.asked.add(coming)
            self.ask(coming)
        attempt = self.sw._course._attempt
        if attempt is not None:
            self.wait_for(attempt)

    def wait_for(self, attempt):
        """Until the next world is prepared, here and by the newcomers."""
        end = time.monotonic() + PATIENCE
        attempt.join(PATIENCE)
        while time.monotonic() < end and not attempt.problem and attempt.way.cold():
            time.sleep(0.01)

    def ask(self, generation):
        stop = self.stops[generation]
        arguments = {"layout": stop.layout, "members": stop.members, "generation": generation, "mode": stop.mode}
        self.worlds.requests.publish(json.dumps({"verb": "scale", "by": "test", "arguments": arguments}))


def case_of(steps, **more):
    """A run of at most so many steps, the oracle's state known after each."""
    return Case(tour=("",) * steps, steps_each=1, **{"micro_batches": 8, "samples": 84} | more)


def expected(case):
    """The oracle's losses and states after each step, with the moving average that the members keep."""
    losses, visits = jobs.expected(case)
    kinds = [key for key in visits[0] if key[1] == "param"]
    start = jobs.start_of(case)
    average = {name: start[name].clone() for name, _ in kinds}
    for visit in visits:
        for name, _ in kinds:
            average[name] = Ema.KEEP * average[name] + (1 - Ema.KEEP) * visit[name, "param"]
            visit[name, "ema.shadow"] = average[name].clone()
    return losses, visits


def travel(case, stops, visits, seconds=90, member=Member, **more):
    """The tour on forked processes, one for each member; what each saw."""

    def work(world):
        try:
            return member(world, case, stops, visits, **more).run()
        except NotAdmittedError as refused:
            return {"refused": str(refused)}

    size = 1 + max(max(stop.members) for stop in stops)
    return ranks.run(size, work, seconds)
