"""Switches between any two layouts over all axes, carried out by the executor on many ranks in one process."""

import random

import pytest
from tests import toys
from tests.doubles import LateTransport
from tests.histogram import lacking
from tests.stamped import Ballot, Rank, everywhere, local, schedule

from dynatrain.execute import wire
from dynatrain.judge.judge import judge_all
from dynatrain.plan.build import rank_plan
from dynatrain.plan.schedule import default_budget, keep_schedule, tight_schedule
from dynatrain.plan.storage import storage
from dynatrain.plan.turns import with_turns
from dynatrain.space.ownership import declared


@pytest.fixture(autouse=True)
def _small_bundles(monkeypatch):
    """Many bundles, and items cut inside a row, on small jobs."""
    monkeypatch.setattr(wire, "BUNDLE_BYTES", 512)
    monkeypatch.setattr(wire, "PACK_BYTES", 128)


def announced(catalogue, old, new, mode, seed):
    """The rounds and turns that rank 0 of a run would announce."""
    rounds = tight_schedule(*tight(catalogue, old, new)) if mode == "tight" else None
    rounds = rounds or keep_schedule(catalogue, 1 << (6 + seed % 8), (old, new))
    return with_turns(catalogue, old, new, rounds, ranks_per_node=4)


def tight(catalogue, old, new):
    stored = storage(catalogue, old, new)
    return stored, default_budget(stored)


def misplaced(of, before, after, mode, seed, rounds_of=None):
    """What ranks do not hold as they should after a switch, and what their executors and the judge said."""
    catalogue = toys.catalogue(of)
    old, new = (declared(catalogue, layout, of.layers) for layout in (before, after))
    size = max(before.world_size, after.world_size)
    rounds = rounds_of(catalogue, old, new, mode, seed) if rounds_of else None
    rounds = rounds or schedule(catalogue, mode, per_round=1 + seed % 20)
    parts = [rank_plan(catalogue, old, new, rank, rounds, ranks_per_node=4) for rank in range(size)]
    agree, transports = Ballot(size), [LateTransport(one, seed * 31 + rank) for rank, one in enumerate(local(size))]
    ranks = [
        Rank(catalogue, old, new, part, transport, agree) for part, transport in zip(parts, transports, strict=True)
    ]
    said = everywhere(ranks, lambda rank: ranks[rank].executor.run(20))
    problems = judge_all(catalogue, old, new, parts, budget_bytes=1 << 30 if mode == "tight" else None).problems
    return [rank.misplaced(new, rank.executor.new) for rank in ranks], [one for one in said if one], problems


def walk(seed, legs, worlds):
    """A toy that goes from layout to layout and back to the first: ``(toy, before, after, mode)`` of each switch."""
    pick = random.Random(seed).choice
    of = toys.toy(pick)
    stops = [toys.layout(pick, of, pick(worlds)) for _ in range(legs)]
    for before, after in zip(stops, [*stops[1:], stops[0]], strict=True):
        yield of, before, after, pick(("keep", "tight"))


SHORT = dict.fromkeys(range(4), (2, (4, 6, 8)))
LONG = dict.fromkeys(range(100, 300), (5, toys.WORLDS))
"""Layouts of each seed's walk, and the worlds that they are of."""


@pytest.mark.parametrize("seed", SHORT)
def test_every_element_arrives_at_its_place(seed):
    for case in walk(seed, *SHORT[seed]):
        assert misplaced(*case, seed) == ([[]] * max(case[1].world_size, case[2].world_size), [], ())


@pytest.mark.parametrize("seed", range(4, 8))
def test_every_element_arrives_by_the_rounds_and_turns_that_are_announced(seed):
    for case in walk(seed, 2, (4, 6, 8)):
        assert misplaced(*case, seed, announced) == ([[]] * max(case[1].world_size, case[2].world_size), [], ())


@pytest.mark.sweep
@pytest.mark.parametrize("seed", LONG)
def test_every_element_arrives_at_its_place_on_long_walks(seed):
    for case in walk(seed, *LONG[seed]):
        assert misplaced(*case, seed) == ([[]] * max(case[1].world_size, case[2].world_size), [], ())


def test_the_walks_reach_every_axis_every_change_and_every_optimizer():
    drawn = [case[:3] for seed, how in (SHORT | LONG).items() for case in walk(seed, *how)]

    assert len(drawn) >= 1000
    assert lacking(drawn) == []
