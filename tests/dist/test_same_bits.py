"""Layouts of dp and fsdp have the bits of one process that adds its micro-batches in the same tree."""

from dataclasses import replace

import pytest
from tests import jobs
from tests.jobs import Case, expected, train

# Every head has its own keys: the oracle repeats shared ones in plain sight, and torch's kernel adds the repeats'
# gradients up in another order.
SHAPE = replace(jobs.SHAPE, num_key_value_heads=jobs.SHAPE.num_attention_heads)
TOUR = ("dp4", "fsdp4", "dp2.fsdp2", "fsdp4-z2", "dp2.fsdp2-z2", "dp4")


RUNS = [
    ("fp32", "clipping, exact norm"),
    ("fp64", "clipping inactive"),
    pytest.param(("fp32", "clipping inactive"), marks=pytest.mark.sweep),
    pytest.param(("fp64", "clipping, exact norm"), marks=pytest.mark.sweep),
]


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def run(request):
    compute, clipping = request.param
    active = clipping != "clipping inactive"
    clip = 0.25 if active else 100.0
    case = Case(tour=TOUR, compute=compute, micro_batches=8, clip=clip, exact_norm=active, seed=7, shape=SHAPE)
    losses, visits = expected(case)
    return case, active, losses, train(case, visits, seconds=120)


def test_every_bit_of_parameters_and_moments_is_the_oracles_after_each_visit(run):
    case, _, _, found = run

    for rank, result in enumerate(found):
        for layout, apart in zip(case.tour, result["apart"], strict=True):
            assert set(apart.values()) == {0.0}, f"{layout}, rank {rank}: {apart}"


def test_losses_and_norms_have_equal_bits_on_all_ranks_and_clipping_is_as_stated(run):
    case, active, losses, found = run
    limit = 1e-12 if case.compute == "fp64" else 1e-6

    for result in found:
        assert [step[1:4] for step in result["steps"]] == [step[1:4] for step in found[0]["steps"]]
    assert [step[1] for step in found[0]["steps"]] == pytest.approx(losses, rel=0, abs=limit)
    assert all((norm > case.clip) == active for _, _, norm, *_ in found[0]["steps"])
