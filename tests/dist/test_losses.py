"""Ranks that are lost without warning: the others go on, and the run is the one that lost nobody, to 1e-12."""

import pytest
from tests import jobs
from tests.crossings import SHALLOW, case_of
from tests.survivors import Fall, survive

LIMIT = 1e-12


def check(case, falls, found, losses):
    """What survivors saw is the oracle's, each step once."""
    fallen = {fall.member for fall in falls}
    told = {}
    for member, result in enumerate(found):
        if member in fallen:
            assert result is None
            continue
        assert isinstance(result, dict), found
        numbers = [step[0] for step in result["steps"]]
        assert numbers == list(range(len(numbers))), (member, numbers)
        assert result["left"] or len(numbers) == case.steps
        assert all(switch[0] == "committed" and switch[3] for switch in result["switches"]), result["switches"]
        for (step, loss, ids, asked), apart in zip(result["steps"], result["apart"], strict=True):
            assert abs(loss - losses[step]) <= LIMIT, (member, step)
            assert {"param", "exp_avg", "exp_avg_sq", "step"} == apart.keys()
            assert max(apart.values()) <= LIMIT, (member, step, apart)
            told.setdefault(step, set(ids))
            assert set(asked) <= set(ids)
    return told


@pytest.mark.parametrize("place", ["begin", "totals", "coupled", "updated"])
def test_a_killed_rank_of_copies_costs_no_step_wherever_in_a_step_it_falls(place):
    case = case_of(6, shape=SHALLOW)
    falls = (Fall(3, 2, place, "fsdp3", (0, 1, 2)),)
    losses, visits = jobs.expected(case)

    check(case, falls, survive(case, "dp2.fsdp2", 4, falls, visits), losses)
