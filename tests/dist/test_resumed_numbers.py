"""A run that is saved in one layout and gone on with in another, on other ranks, is the run of the plain-torch oracle.

Every attempt trains on beside its save and dies: what it did after the saved step is lost, and done again by the next.
"""

import itertools
from dataclasses import replace

import pytest
from tests import jobs
from tests.jobs import expected
from tests.legs import EVERY, case_of, kept, leg, random_legs, run_legs

LIMIT = 1e-12
MIXED = tuple(map(leg, ("fsdp4", "pp2_1_3.tp2", "dp3", "fsdp2.tp2-sp", "dp1")))
WIDE = tuple(map(leg, ("pp2_1_3.fsdp2.tp2", "tp2")))
SEEDS = (11, 12, 13, 14, 15, 16)

pytestmark = pytest.mark.timeout(900)  # the first test of a run waits for the whole run

RUNS = {"eight ranks": WIDE, "mixed": MIXED}
RUNS |= {f"seed {seed}": random_legs(seed, 12, micro_batches=8) for seed in SEEDS}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "eight ranks" else pytest.mark.sweep) for name in RUNS],
)
def run(request, tmp_path_factory):
    legs = RUNS[request.param]
    case = case_of(legs)
    losses, visits = expected(case)
    return legs, case, losses, run_legs(case, legs, visits, tmp_path_factory.mktemp("saves"))


def test_every_attempt_goes_on_from_the_save_of_the_one_before(run):
    legs, _, _, found = run

    for number, (one, attempt) in enumerate(zip(legs, found, strict=True)):
        assert len(attempt) == one.size
        assert {rank["first"] for rank in attempt} == {found[number - 1][0]["saved"] if number else 0}
        assert {rank["saved"] for rank in attempt} == {attempt[0]["saved"]}
        if number < len(legs) - 1:
            assert attempt[0]["first"] < attempt[0]["saved"] <= attempt[0]["first"] + EVERY + 1


def test_what_is_loaded_and_what_comes_of_it_are_the_oracles_boxes_on_every_rank(run):
    legs, _, _, found = run

    for number, (one, attempt) in enumerate(zip(legs, found, strict=True)):
        for rank, result in enumerate(attempt):
            assert len(result["apart"]) == len(result["steps"])
            for apart in [*([result["loaded"]] if number else []), *result["apart"]]:
                assert apart.keys() == {"param", "exp_avg", "exp_avg_sq", "step"}
                assert apart["step"] == 0
                assert max(apart.values()) <= LIMIT, f"attempt {number}, {one.layout}, rank {rank}: {apart}"


def test_every_steps_loss_is_the_oracles_on_every_rank(run):
    _, _, losses, found = run

    for result in itertools.chain(*found):
        assert [step[1] for step in result["steps"]] == pytest.approx(
            [losses[step[0]] for step in result["steps"]], rel=0, abs=LIMIT
        )
    assert [step[0] for step in kept(found)] == list(range(kept(found)[-1][0] + 1))


def test_every_sample_is_trained_on_once_an_epoch_and_by_the_ranks_once(run):
    _, case, _, found = run

    order = [number for step in kept(found) for number in step[4]]
    epochs = [order[start : start + case.samples] for start in range(0, len(order), case.samples)]
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
    for attempt in found:
        for step, of_ranks in enumerate(zip(*(rank["steps"] for rank in attempt), strict=True)):
            shares = {}
            for rank, result in enumerate(of_ranks):
                at = attempt[0]["layout"].coordinates(rank)
                shares.setdefault((at.pp, at.tp), []).append(result[5])
            for share in shares.values():
                dealt = [number for row in itertools.zip_longest(*share) for number in row if number is not None]
                ids = of_ranks[0][4]
                assert dealt[: len(ids)] == ids, f"step {step} of the attempt"
                assert set(dealt[len(ids) :]) <= {ids[0]}, "what fills uneven shares up has no targets"


# Every head has its own keys: see test_same_bits.
SHAPE = replace(jobs.SHAPE, num_key_value_heads=jobs.SHAPE.num_attention_heads)
DATA = tuple(map(leg, ("fsdp4", "dp2", "dp2.fsdp2")))
MORE = tuple(map(leg, ("dp8", "fsdp8", "dp1", "dp4.fsdp2", "fsdp2-z2", "dp2.fsdp4", "dp4", "fsdp4")))


@pytest.mark.parametrize("compute", ["fp32", "fp64"])
@pytest.mark.parametrize("legs", [DATA, pytest.param(MORE, marks=pytest.mark.sweep)], ids=["three", "nine"])
def test_data_parallel_attempts_have_the_bits_of_the_run_that_never_stopped(tmp_path, compute, legs):
    case = case_of(legs, compute=compute, clip=0.25, exact_norm=True, seed=7, shape=SHAPE)
    losses, visits = expected(case)
    found = run_legs(case, legs, visits, tmp_path)

    for number, (one, attempt) in enumerate(zip(legs, found, strict=True)):
        for rank, result in enumerate(attempt):
            for apart in [*([result["loaded"]] if number else []), *result["apart"]]:
                assert set(apart.values()) == {0.0}, f"attempt {number}, {one.layout}, rank {rank}: {apart}"
    assert [step[1] for step in kept(found)] == pytest.approx(
        losses[: len(kept(found))], rel=0, abs=1e-12 if compute == "fp64" else 1e-6
    )
