"""Switches between any two layouts over all axes, carried out by the executor on many ranks in one process."""

import random

import pytest
from tests import toys
from tests.doubles import LateTransport
from tests.stamped import Ballot, Rank, everywhere, local, schedule

from dynatrain.execute import wire
from dynatrain.plan.build import rank_plan
from dynatrain.space.ownership import declared


@pytest.fixture(autouse=True)
def _small_bundles(monkeypatch):
    """Many bundles, and items cut inside a row, on small jobs."""
    monkeypatch.setattr(wire, "BUNDLE_BYTES", 512)
    monkeypatch.setattr(wire, "PACK_BYTES", 128)


def misplaced(of, before, after, mode, seed):
    """What ranks do not hold as they should after a switch, and what their executors said."""
    catalogue = toys.catalogue(of)
    old, new = (declared(catalogue, layout, of.layers) for layout in (before, after))
    size = max(before.world_size, after.world_size)
    rounds = schedule(catalogue, mode, per_round=1 + seed % 20)
    agree, transports = Ballot(size), [LateTransport(one, seed * 31 + rank) for rank, one in enumerate(local(size))]
    ranks = [
        Rank(
            catalogue, old, new, rank_plan(catalogue, old, new, rank, rounds, ranks_per_node=4), transports[rank], agree
        )
        for rank in range(size)
    ]
    said = everywhere(ranks, lambda rank: ranks[rank].executor.run(20))
    return [rank.misplaced(new, rank.executor.new) for rank in ranks], said


def walk(seed, legs, worlds):
    """A toy that goes from layout to layout and back to the first."""
    pick = random.Random(seed).choice
    of = toys.toy(pick)
    stops = [toys.layout(pick, of, pick(worlds)) for _ in range(legs)]
    for before, after in zip(stops, [*stops[1:], stops[0]], strict=True):
        wrong, said = misplaced(of, before, after, pick(("keep", "tight")), seed)
        assert said == [None] * len(said)
        assert wrong == [[]] * len(wrong)


@pytest.mark.parametrize("seed", range(4))
def test_every_element_arrives_at_its_place(seed):
    walk(seed, 2, (4, 6, 8))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(100, 200))
def test_every_element_arrives_at_its_place_on_long_walks(seed):
    walk(seed, 4, range(1, 17))
