"""A move that is shifted by a row, two states that are swapped, a move that is dropped: each is caught again and again.

By the judge; with the judge switched off, by the sum of move hashes where the two ends differ; with that off as well,
by the digests; and with all of them off by the stamps, which hence do not pass by accident.
"""

from dataclasses import replace

import pytest
from tests.jobs import everywhere, late
from tests.walks import Walker

from dynatrain.execute.memory import Nearest
from dynatrain.execute.rounds import Executor
from dynatrain.execute.transport import GroupTransport
from dynatrain.train import attempt as attempts
from dynatrain.train import blueprint
from dynatrain.train.proof import Proof

nearest = Nearest()

NAME = "layers.1.down.weight"
"""Its columns are cut by tp4, its rows by fsdp4: rows 6-12 of columns 24-36 go from rank 2 to rank 1."""
SRC, DST, CORNER = 2, 1, (6, 24)
BOX = ((6, 12), (24, 36))
STATES = ("param", "exp_avg", "exp_avg_sq", "ema.shadow", "mean.local")


def change(tensors, plan, *, sends=True, receives=True, into):
    """``plan`` with the one move between the two ranks replaced by what ``into`` makes of it, at one end or both."""

    def swap(moves):
        for move in moves:
            it = (tensors[move.tensor].name, move.src, move.dst, move.box) == (NAME, SRC, DST, BOX)
            yield from into(move) if it else (move,)

    return replace(
        plan,
        sends=tuple(swap(plan.sends)) if sends else plan.sends,
        receives=tuple(swap(plan.receives)) if receives else plan.receives,
    )


def shifted(move):
    (start, stop), columns = move.box
    return (replace(move, box=((start + 1, stop + 1), columns)),)


def dropped(_move):
    return ()


def one_state_twice(move):
    """The second moment in the place of the first: what swapped states are at the end that receives."""
    return (replace(move, states=tuple(s for s in move.states if s != 1)), replace(move, states=(2,)))


def plan_with(patch, **how):
    plan = blueprint.rank_plan
    patch.setattr(blueprint, "rank_plan", lambda tensors, *a, **k: change(tensors, plan(tensors, *a, **k), **how))


def execute_with_swapped_moments(patch, rank):
    def executor(**given):
        index = next(i for i, tensor in enumerate(given["exchange"].catalogue) if tensor.name == NAME)
        if rank == SRC:
            old = given["old"]
            given["old"] = old | {(index, 1): old[index, 2], (index, 2): old[index, 1]}
        return Executor(**given)

    patch.setattr(attempts, "Executor", executor)


def switch_off(patch, guards):
    if "judge" in guards:
        for name in ("judge_rank", "judge_whole"):
            judge = getattr(blueprint, name)
            patch.setattr(blueprint, name, lambda *a, judge=judge, **k: replace(judge(*a, **k), problems=()))
    if "hashes" in guards:
        for name in ("sent_hash", "received_hash"):
            patch.setattr(blueprint, name, lambda *_: 0)
    if "digests" in guards:
        judge = Proof.judge
        patch.setattr(Proof, "judge", lambda *a, **k: judge(*a, **k) and "")


FAULTS = {
    "shifted at both ends": lambda patch, _rank: plan_with(patch, into=shifted),
    "shifted at its source": lambda patch, _rank: plan_with(patch, into=shifted, receives=False),
    "swapped where they arrive": lambda patch, _rank: plan_with(patch, into=one_state_twice, sends=False),
    "swapped under way": execute_with_swapped_moments,
    "dropped": lambda patch, _rank: plan_with(patch, into=dropped),
}
GUARDS = ("judge", "hashes", "digests")
CAUGHT_BY = {
    "judge": ("shifted at both ends", "shifted at its source", "swapped where they arrive", "dropped"),
    "hashes": ("shifted at its source",),
    "digests": ("shifted at its source", "swapped under way", "dropped"),
    "stamps": ("shifted at its source", "swapped under way", "dropped"),
}


def plant_all(world, transport):
    """Plant each fault with all guards switched off that come before the one that is to catch it."""
    walker = Walker(world, "tp4", transport=transport)
    found = {}
    for (number, guard), fault in ((one, fault) for one in enumerate(CAUGHT_BY) for fault in CAUGHT_BY[one[1]]):
        with pytest.MonkeyPatch.context() as patch:
            FAULTS[fault](patch, world.rank)
            switch_off(patch, GUARDS[:number])
            book = walker.go("fsdp4")
        came = "fsdp4" if book["outcome"] == "committed" else "tp4"
        found[guard, fault] = (book["outcome"], book["reason"], walker.misplaced(came))
        if came == "fsdp4":
            walker.fill("fsdp4")
            walker.go("tp4")
            found["back", fault] = walker.misplaced("tp4")
    return found


@pytest.fixture(
    scope="module", params=[nearest, *(pytest.param(one, marks=pytest.mark.sweep) for one in (GroupTransport, late))]
)
def found(request):
    return everywhere(4, lambda world: plant_all(world, request.param), 200)


@pytest.mark.parametrize("fault", CAUGHT_BY["judge"])
def test_the_judge_refuses_the_plan_and_names_the_move(found, fault):
    for rank in found:
        outcome, reason, wrong = rank["judge", fault]
        assert (outcome, wrong) == ("aborted", [])
        assert "the judge refuses the plan" in reason
        assert NAME in reason


def test_a_plan_that_differs_at_its_two_ends_is_refused_by_the_sum_of_its_moves(found):
    for rank in found:
        outcome, reason, wrong = rank["hashes", "shifted at its source"]
        assert (outcome, wrong) == ("aborted", [])
        assert "the ranks' plans differ" in reason


@pytest.mark.parametrize(
    ("fault", "state", "dst", "first"),
    [
        ("shifted at its source", "param", DST, CORNER),
        ("swapped under way", "exp_avg", 0, (0, 24)),
        ("dropped", "param", DST, CORNER),
    ],
)
def test_the_digests_abort_the_switch_and_name_tensor_state_rank_and_index(found, fault, state, dst, first):
    for rank in found:
        outcome, reason, wrong = rank["digests", fault]
        assert (outcome, wrong) == ("aborted", [])
        assert f"digests differ after the move: {NAME} {state} on rank {dst} in box" in reason
        assert f"first at index {first}" in reason
        assert f"{NAME} exp_avg on rank {DST} in box" in reason


@pytest.mark.parametrize("fault", ["shifted at its source", "dropped"])
def test_the_stamps_tell_the_element_where_the_fault_begins(found, fault):
    for number, rank in enumerate(found):
        outcome, _, wrong = rank["stamps", fault]
        assert outcome == "committed"
        assert sorted(wrong) == (sorted((NAME, state, CORNER) for state in STATES) if number == DST else [])
        assert rank["back", fault] == []


def test_the_stamps_tell_swapped_states_apart(found):
    for number, rank in enumerate(found):
        outcome, _, wrong = rank["stamps", "swapped under way"]
        assert outcome == "committed"
        assert wrong == [(NAME, state, (6 * number, 24)) for state in ("exp_avg", "exp_avg_sq")]
        assert rank["back", "swapped under way"] == []
