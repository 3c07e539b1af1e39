"""Random models trained on random walks over all axes: every switch moves every bit, and every run is the oracle's."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from tests import oracle_experts, random_runs
from tests.histogram import lacking
from tests.jobs import expected, train
from tests.pasted import pasted, same

from dynatrain.space import optimizers as schemas
from dynatrain.train.optimizers import adamw8bit

SHORT = (35,)
"""Seeds that are tried first, on four ranks."""


@pytest.fixture
def say(capsys):
    """Print beside the tests' own marks."""

    def told(text):
        with capsys.disabled():
            sys.stdout.write(f"\n{text}\n")

    return told


def check(seed, monkeypatch, say):
    walk = random_runs.walk(seed)
    case, nearest = walk.case, random_runs.Nearest()
    monkeypatch.setattr(oracle_experts, "choice", nearest)
    for module in (schemas, adamw8bit):
        monkeypatch.setattr(module, "BLOCK", walk.toy.block)  # rows of several blocks, and ranks that share one
    losses, visits = ([], []) if random_runs.flips(case) else expected(case)
    flips = random_runs.flips(case, nearest.least)
    found = train(case, [] if flips else visits)

    for result in found:
        assert result["layouts"] == [layout for layout in walk.stops for _ in range(case.steps_each)]
        assert [(outcome, equal) for outcome, _, _, equal in result["switches"]] == [("committed", True)] * 4
        assert len(result["moved"]) == 4
    for ends in zip(*(result["moved"] for result in found), strict=True):
        before, after = (pasted(side) for side in zip(*ends, strict=True))
        assert same(before, after) == []
    if flips:
        say(f"seed {seed}: {' -> '.join(case.tour)}: {', '.join(flips)}: states right after each switch")
        return
    assert max(apart for result in found for visit in result["apart"] for apart in visit.values()) <= 1e-12, case
    assert np.abs(np.subtract([step[1] for step in found[0]["steps"]], losses)).max() <= 1e-12, case


@pytest.mark.sweep
@pytest.mark.parametrize("seed", SHORT)
def test_a_random_walk_of_four_ranks_is_the_oracles_run(seed, monkeypatch, say):
    check(seed, monkeypatch, say)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", random_runs.SEEDS)
def test_random_walks_of_four_to_eight_ranks_are_the_oracles_runs(seed, monkeypatch, say):
    check(seed, monkeypatch, say)


@pytest.mark.sweep
def test_the_walks_reach_every_axis_every_change_and_every_optimizer(say):
    walks = [random_runs.walk(seed) for seed in random_runs.SEEDS]
    say("what may flip: " + "; ".join(f"{name}: {why}" for name, why in random_runs.DISCRETE.items()))

    assert lacking(switch for walk in walks for switch in walk.switches) == []
    assert {walk.case.size for walk in walks} == {4, 5, 6, 7, 8}
    assert sum(not random_runs.flips(walk.case) for walk in walks) >= 24


def test_what_a_switch_leaves_out_or_alters_is_told():
    held = [
        {("w", "param"): (((0, 2), (0, 2)), np.ones((2, 2)))},
        {("w", "param"): (((2, 3), (0, 2)), np.ones((1, 2)))},
    ]
    moved = [{("w", "param"): (((0, 3), (0, 2)), np.ones((3, 2)))}] * 2
    assert same(pasted(held), pasted(moved)) == []

    bent = np.ones((3, 2))
    bent[2, 1] = np.nextafter(1, 2)
    bent = {("w", "param"): (((0, 3), (0, 2)), bent)}
    assert same(pasted(held), pasted([bent])) == [("w", "param")]
    with pytest.raises(AssertionError, match="differ"):
        pasted([*moved, bent])
    with pytest.raises(AssertionError, match="w"):
        pasted(held[1:])


def test_what_may_flip_is_what_the_closed_list_says():
    case = random_runs.walk(5).case
    nearest = random_runs.Nearest()
    sizes = replace(case.shape.experts, num_experts=4, num_experts_per_tok=2)

    assert nearest(sizes, [0.1, 0.4, 0.2, 0.3]) == [1, 3]
    assert random_runs.flips(case, nearest.least) == []
    assert nearest(sizes, [0.1, 0.4, 0.3 + 1e-13, 0.3]) == [1, 2]
    assert random_runs.flips(case, nearest.least) == ["top-k"]
    assert random_runs.flips(replace(case, bf16=True)) == ["bf16 Newton-Schulz"]
    assert random_runs.flips(replace(case, optimizer="adamw8bit")) == ["8-bit codes"]
