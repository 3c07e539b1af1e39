"""A job in several attempts: each on ranks of its own, gone on from what the one before has saved."""

import random
import time
from dataclasses import dataclass

from tests.jobs import SHAPE, TOKENS, Asking, Books, Case, distance, everywhere, switcher

from dynatrain.layout.legality import problems
from dynatrain.layout.text import parse_layout
from dynatrain.observe.checkpoints import newest
from dynatrain.train.saving import Saves
from dynatrain.train.snapshot import Snapshot
from dynatrain.train.trainer import Trainer

EVERY = 2
"""Steps of an attempt up to its save; it trains on for a while beside that, and those steps are lost."""

SPLITS = {2: ("pp2", "pp2_1_3"), 3: ("pp3", "pp3_1_2_1", "pp3_2_1_1"), 4: ("pp4",)}


@dataclass(frozen=True)
class Leg:
    """One attempt: so many ranks in one layout."""

    size: int
    layout: str


def leg(text):
    """The attempt in a layout."""
    return Leg(parse_layout(text).world_size, text)


def legal_texts(size, *, micro_batches):
    """Every layout of ``size`` ranks that the tests' model allows: uneven stages, orders of the axes as usual."""
    found = []
    for pp in (1, 2, 3, 4):
        for tp in (1, 2, 4):
            if size % (pp * tp):
                continue
            left = size // (pp * tp)
            for dp in (n for n in range(1, left + 1) if left % n == 0):
                data = [f"{name}{n}" for name, n in (("dp", dp), ("fsdp", left // dp)) if n > 1]
                for stages in SPLITS.get(pp, ("",)):
                    for width in (f"tp{tp}", f"tp{tp}-sp") if tp > 1 else ("",):
                        text = ".".join(part for part in (stages, *data, width) if part) or "dp1"
                        limits = {"world_size": size, "num_microbatches": micro_batches, "sequence": TOKENS}
                        if not problems(parse_layout(text), SHAPE.limits(), **limits):
                            found.append(text)
    return found


def random_legs(seed, count, *, micro_batches, sizes=range(1, 9)):
    """``count`` attempts in a row: worlds of other sizes, layouts of every kind."""
    generator = random.Random(seed)
    found = []
    while len(found) < count:
        size = generator.choice([n for n in sizes if not found or n != found[-1].size])
        found.append(Leg(size, generator.choice(legal_texts(size, micro_batches=micro_batches))))
    return tuple(found)


def case_of(legs, **more):
    """The run that all attempts together are; each of its steps is a visit, so that the oracle's state is known."""
    return Case(tour=("",) * (EVERY * len(legs)), steps_each=1, **{"micro_batches": 8, "samples": 28} | more)


def run_legs(case, legs, visits, root, seconds=120):
    """Carry all attempts out; of each rank of each attempt what it saw: see :func:`_attempt`."""
    return [
        everywhere(one.size, lambda world, n=n, one=one: _attempt(case, n, one, visits, root, world), seconds)
        for n, one in enumerate(legs)
    ]


def slow_copies():
    """Have a snapshot take longer than the step beside which it is made: the optimizer must wait for it."""
    copy = Snapshot._copy

    def slowly(*given):
        time.sleep(0.003)
        copy(*given)

    Snapshot._copy = slowly


def _attempt(case, number, one, visits, root, world):
    slow_copies()
    job, data = case.job(), Asking(case.data())
    sw = switcher(job, world, one.layout, recorder=Books(), saves=Saves(root=root, every=EVERY))
    first = sw.load(newest(root)[0]) if number else 0
    loaded = distance(sw.world, world.rank, visits[first - 1]) if first else {}
    steps, apart = [], []

    def after(result):
        steps.append((result.step, result.loss, result.grad_norm, result.lr, result.ids.tolist(), data.take()))
        apart.append(distance(sw.world, world.rank, visits[result.step]))

    Trainer(job, data, sw, after).run(min(first + EVERY + 1, case.steps))
    sw._saver.finish()
    return {"first": first, "saved": sw.saved, "loaded": loaded, "steps": steps, "apart": apart, "layout": sw.layout}


def kept(found):
    """What became of the run: the steps up to each attempt's save, and of the last attempt all; as rank 0 saw them."""
    ends = [attempt[0]["first"] for attempt in found[1:]] + [float("inf")]
    return [step for attempt, end in zip(found, ends, strict=True) for step in attempt[0]["steps"] if step[0] < end]
