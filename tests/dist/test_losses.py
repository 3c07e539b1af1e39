"""Ranks that are lost without warning: the others go on, and the run is the one that lost nobody, to 1e-12."""

import json
import signal
import time

import pytest
from tests import jobs
from tests.crossings import SHALLOW, case_of
from tests.survivors import Fall, survive

from dynatrain.observe.checkpoints import MANIFEST, checkpoint_name, usable
from dynatrain.train.keeping import Keeps
from dynatrain.train.saving import Saves

LIMIT = 1e-12


def check(case, falls, found, losses, *, back=0):
    """What survivors saw is the oracle's; each step came once, but for the last ``back`` before the loss."""
    fallen = {fall.member for fall in falls}
    for member, result in enumerate(found):
        if member in fallen:
            assert result is None
            continue
        assert isinstance(result, dict), found
        numbers = [step[0] for step in result["steps"]]
        again = next((place for place in range(1, len(numbers)) if numbers[place] <= numbers[place - 1]), len(numbers))
        assert numbers[:again] == list(range(again)), (member, numbers)
        assert numbers[again:] == list(range(again - back, again - back + len(numbers) - again)), (member, numbers)
        assert result["left"] or numbers[-1] == case.steps - 1
        if not result["left"]:  # who leaves keeps no book of it
            assert result["switches"][-1][0] == "committed", result["switches"]
        assert all(switch[3] for switch in result["switches"] if switch[0] == "committed"), result["switches"]
        for (step, loss, ids, asked), apart in zip(result["steps"], result["apart"], strict=True):
            assert abs(loss - losses[step]) <= LIMIT, (member, step)
            assert {"param", "exp_avg", "exp_avg_sq", "step"} == apart.keys()
            assert max(apart.values()) <= LIMIT, (member, step, apart)
            assert set(asked) <= set(ids)


SWEPT = pytest.mark.sweep


@pytest.mark.parametrize(
    "place",
    [pytest.param("begin", marks=SWEPT), "totals", *(pytest.param(p, marks=SWEPT) for p in ("coupled", "updated"))],
)
def test_a_killed_rank_of_copies_costs_no_step_wherever_in_a_step_it_falls(place):
    case = case_of(4, shape=SHALLOW)
    falls = (Fall(3, 1, place, "fsdp3", (0, 1, 2)),)
    losses, visits = jobs.expected(case)

    check(case, falls, survive(case, "dp2.fsdp2", 4, falls, visits), losses)


def test_whoever_has_not_the_last_words_of_a_step_takes_them_from_whoever_has():
    case = case_of(4, shape=SHALLOW)
    falls = (Fall(2, 1, "coupled", "fsdp2", (0, 3), denied=(0, 1)),)
    losses, visits = jobs.expected(case)

    check(case, falls, survive(case, "dp2.fsdp2", 4, falls, visits), losses)


@pytest.mark.sweep
def test_a_halted_rank_holds_nobody_up():
    case = case_of(3, shape=SHALLOW)
    falls = (Fall(0, 1, "begin", "dp3", (1, 2, 3), by=signal.SIGSTOP.name),)
    losses, visits = jobs.expected(case)

    check(case, falls, survive(case, "dp2.fsdp2", 4, falls, visits), losses)


@pytest.mark.sweep
@pytest.mark.parametrize("phase", ["build", "move", "commit"])
def test_who_falls_while_others_cross_is_lost_with_those_before(phase):
    case = case_of(4, shape=SHALLOW)
    falls = (Fall(3, 1, "totals", "dp3", (0, 1, 2)), Fall(0, 1, phase, "dp2", (1, 2)))
    losses, visits = jobs.expected(case)

    found = survive(case, "dp4", 4, falls, visits)

    check(case, falls, found, losses)
    assert [outcome for outcome, *_ in found[1]["switches"]][-1:] == ["committed"]
    assert found[1]["losses"][-1][1] == (3, 0)


@pytest.mark.parametrize(("place", "member"), [("connects", 1), pytest.param("told", 0, marks=SWEPT)])
def test_who_falls_between_coming_to_a_group_and_connecting_leaves_nobody_waiting_for_it(place, member):
    case = case_of(3, shape=SHALLOW)
    other = 1 - member
    falls = (Fall(2, 1, "totals", "dp2", (0, 1)), Fall(member, 1, place, "dp1", (other,)))
    losses, visits = jobs.expected(case)

    found = survive(case, "dp3", 3, falls, visits)

    check(case, falls, found, losses)
    assert found[other]["losses"][-1][1] == (2, member)


def test_who_falls_before_anybody_has_made_a_step_costs_none():
    case = case_of(2, shape=SHALLOW)
    falls = (Fall(2, 0, "begin", "dp2", (0, 1)),)
    losses, visits = jobs.expected(case)

    check(case, falls, survive(case, "dp3", 3, falls, visits), losses)


def test_who_falls_behind_the_last_step_is_lost_and_the_others_save_it(tmp_path):
    case = case_of(2, shape=SHALLOW)
    falls = (Fall(2, 1, "over", "dp2", (0, 1)),)
    losses, visits = jobs.expected(case)

    found = survive(case, "dp3", 3, falls, visits, saves=Saves(root=tmp_path))

    check(case, falls, found, losses)
    assert [found[member]["saved"] for member in (0, 1)] == [2, 2]
    assert usable(tmp_path / checkpoint_name(2))


@pytest.mark.sweep
def test_where_what_falls_behind_the_last_step_has_no_copy_the_steps_since_the_checkpoint_are_made_again(tmp_path):
    case = case_of(7, shape=SHALLOW)
    falls = (Fall(1, 6, "over", "dp1", (0,)),)
    losses, visits = jobs.expected(case)

    def saved(_sw, step, _found):
        late = time.monotonic() + 20
        while step == 5 and not usable(tmp_path / checkpoint_name(5)) and time.monotonic() < late:
            time.sleep(0.01)  # else the save may be under way when rank 1 falls

    found = survive(case, "fsdp2", 2, falls, visits, beside=saved, saves=Saves(root=tmp_path, every=5))

    check(case, falls, found, losses, back=2)
    assert (found[0]["losses"][0][2]["files"], found[0]["saved"]) == (5, 7)


def asking(verb):
    """Behind the first step, rank 0 is asked for this."""

    def ask(sw, step, _found):
        if (sw.rank, step) == (0, 0):
            sw._party.requests.publish(json.dumps({"verb": verb, "by": "test", "arguments": {}}))

    return ask


@pytest.mark.parametrize(("verb", "place"), [("park", "parked"), ("stop", "stopping")])
def test_who_falls_while_the_run_is_parked_or_saved_to_stop_is_lost_and_the_others_stop_saved(tmp_path, verb, place):
    case = case_of(30, shape=SHALLOW)
    falls = (Fall(2, 0, place, "dp2", (0, 1)),)
    _, visits = jobs.expected(case)

    found = survive(case, "dp3", 3, falls, visits, beside=asking(verb), saves=Saves(root=tmp_path))

    for member in (0, 1):
        assert isinstance(found[member], dict), found
        step = found[member]["step"]
        assert (found[member]["stopped"], found[member]["saved"]) == (True, step)
        assert max(found[member]["end"].values()) <= LIMIT
        assert usable(tmp_path / checkpoint_name(step))


def test_a_parked_run_that_is_not_saved_says_so_at_once_where_somebody_falls():
    case = case_of(30, shape=SHALLOW)

    found = survive(case, "dp2", 2, (Fall(1, 0, "parked", "dp1", (0,)),), (), beside=asking("park"))

    said = "MendError: rank 1 was planted to fall; and the state of those that are left is parked, in a run that is not"
    assert said in str(found[0])


def test_who_falls_in_the_midst_of_a_tight_switch_ends_the_run_at_once_and_is_named():
    case = case_of(30, shape=SHALLOW)
    ask = lambda sw, step, _found: sw.request("fsdp3", mode="tight") if step == 0 else None  # noqa: E731

    found = survive(case, "dp3", 3, (Fall(2, 0, "agreed", "dp2", (0, 1)),), (), 60, beside=ask, round_bytes=1 << 14)

    for member in (0, 1):
        assert "SwitchFailedError" in str(found[member])
        assert "rank 2 was planted to fall" in str(found[member])


def test_what_nobody_else_has_comes_from_its_keeper_and_the_steps_since_are_done_again():
    case = case_of(8, shape=SHALLOW)
    falls = (Fall(1, 6, "begin", "fsdp2", (0, 2)),)
    losses, visits = jobs.expected(case)

    found = survive(case, "fsdp3", 3, falls, visits, keeps=Keeps(every=3))

    check(case, falls, found, losses, back=6 - found[0]["losses"][0][2]["step"])
    assert found[0]["losses"][0][2]["bytes"]["keepers"] > 0


def test_where_no_memory_has_it_the_last_checkpoint_does(tmp_path):
    case = case_of(7, shape=SHALLOW)
    falls = (Fall(0, 5, "totals", "dp1", (1,), behind=tmp_path / checkpoint_name(3) / MANIFEST),)
    losses, visits = jobs.expected(case)

    found = survive(case, "fsdp2", 2, falls, visits, saves=Saves(root=tmp_path, every=3))

    check(case, falls, found, losses, back=2)
    assert found[1]["losses"][0][2]["files"] == 3


def test_where_nothing_is_left_it_says_of_each_step_what_is_missing():
    case = case_of(2, shape=SHALLOW)
    falls = (Fall(1, 1, "begin", "dp1", (0,)),)
    _, visits = jobs.expected(case)

    found = survive(case, "fsdp2", 2, falls, visits)

    assert "MendError: rank 1 was planted to fall; and what is left cannot go on: ranks [1] are lost" in str(found[0])
    assert "step 1: nobody has" in str(found[0])
