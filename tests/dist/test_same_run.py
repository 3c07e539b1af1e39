"""One job that walks over every ordered pair of ten layouts is the run of the plain-torch oracle."""

import itertools
import math

import pytest
from tests.jobs import TEN, Case, circuit, expected, train

from dynatrain.layout.text import print_layout

LIMIT = 1e-12
RUNS = {
    "gloo, seed 1": Case(tour=circuit(TEN, 1), seed=1, modes=("keep", "tight")),
    "late, ten pairs": Case(tour=(*TEN, TEN[0]), seed=4, modes=("tight", "keep"), late=True),
    "gloo, seed 2": Case(tour=circuit(TEN, 2), seed=2, modes=("tight", "keep")),
    "gloo, seed 3": Case(tour=circuit(TEN, 3), seed=3, modes=("keep", "tight")),
    "late": Case(tour=circuit(TEN, 1), seed=1, modes=("tight", "keep"), late=True),
}
LONG = ("gloo, seed 2", "gloo, seed 3", "late")

pytestmark = pytest.mark.timeout(900)  # the first test of a run waits for the whole run


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.sweep if name in LONG else ()) for name in RUNS]
)
def run(request):
    case = RUNS[request.param]
    losses, visits = expected(case)
    return case, losses, train(case, visits, seconds=800)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_circuit_takes_every_ordered_pair_once(seed):
    pairs = list(itertools.pairwise(circuit(TEN, seed)))

    assert len(pairs) == 90
    assert set(pairs) == set(itertools.permutations(TEN, 2))


def test_every_switch_is_committed_at_its_step_with_equal_digests(run):
    case, _, found = run

    expected_switches = [("committed", "", number * case.steps_each, True) for number in range(1, len(case.tour))]
    walked = [layout for layout in case.tour for _ in range(case.steps_each)]
    for rank in found:
        assert rank["switches"] == expected_switches
        assert [print_layout(layout) for layout in rank["layouts"]] == walked


def test_after_each_visit_every_rank_holds_its_boxes_of_the_oracles_state(run):
    case, _, found = run

    for number, layout in enumerate(case.tour):
        for rank, result in enumerate(found):
            apart = result["apart"][number]
            assert apart.keys() == {"param", "exp_avg", "exp_avg_sq", "step"}
            assert apart["step"] == 0
            assert max(apart.values()) <= LIMIT, f"visit {number}, {layout}, rank {rank}: {apart}"


def test_every_steps_loss_is_the_oracles_on_every_rank(run):
    case, losses, found = run

    for result in found:
        assert [step for step, *_ in result["steps"]] == list(range(case.steps))
        assert [loss for _, loss, *_ in result["steps"]] == pytest.approx(losses, rel=0, abs=LIMIT)
        assert [step[1:4] for step in result["steps"]] == [step[1:4] for step in found[0]["steps"]]


def test_every_steps_learning_rate_is_the_schedules_on_every_rank(run):
    case, _, found = run
    settings = case.settings

    def rate(step):
        if step < settings.warmup_steps:
            return settings.lr * (step + 1) / settings.warmup_steps
        done = (step - settings.warmup_steps) / (settings.total_steps - settings.warmup_steps)
        return settings.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)

    for result in found:
        assert [lr for *_, lr, _, _ in result["steps"]] == pytest.approx(
            [rate(s) for s in range(case.steps)], rel=1e-14
        )


def test_every_sample_is_trained_on_once_an_epoch(run):
    case, _, found = run
    order = [number for step in found[0]["steps"] for number in step[4]]

    epochs = [order[start : start + case.samples] for start in range(0, len(order), case.samples)]
    assert all(sorted(epoch) == list(range(case.samples)) for epoch in epochs if len(epoch) == case.samples)
    assert len(set(epochs[-1])) == len(epochs[-1])
    assert epochs[0] != sorted(epochs[0])
    if len(epochs) > 2:
        assert epochs[0] != epochs[1]


def test_the_ranks_of_every_step_are_given_its_samples_once_in_their_order(run):
    """Over the data ranks of each pipeline stage and each tp place, whichever layout is at work."""
    _, _, found = run
    order = [step[4] for step in found[0]["steps"]]

    for step, ids in enumerate(order):
        layout = found[0]["layouts"][step]
        shares = {}
        for rank, result in enumerate(found):
            at = layout.coordinates(rank)
            assert result["steps"][step][4] == ids
            shares.setdefault((at.pp, at.tp), []).append(result["steps"][step][5])
        for share in shares.values():
            dealt = [number for row in itertools.zip_longest(*share) for number in row if number is not None]
            assert dealt == ids, f"step {step} in {print_layout(layout)}"
