"""What survivors make of a loss, over random worlds: their numbers, what they have, and who answers for whom."""

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.losses import recovered, right
from tests.plans.cases import LAYERS, catalogues, layouts

from dynatrain.cluster.crossing import Crossing
from dynatrain.cluster.summons import Summons
from dynatrain.judge.judge import judge_all
from dynatrain.plan.build import rank_plan
from dynatrain.plan.keepers import keepers
from dynatrain.plan.loss import restore
from dynatrain.plan.schedule import keep_schedule
from dynatrain.space.box import volume
from dynatrain.space.ownership import Ownership, declared, num_holders
from dynatrain.train.muster import Stand, memory, renumbered
from dynatrain.train.passage import numbers
from dynatrain.train.proof import in_place_of_lost

NOW, NOTED = 12, 8
few = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@st.composite
def losses(draw):
    """A catalogue, a world of members with any numbers, the loss of some of them, and the layout that follows."""
    catalogue, layout = draw(catalogues()), draw(layouts().filter(lambda layout: layout.world_size > 1))
    size = layout.world_size
    members = tuple(draw(st.permutations(range(3, 3 + size))))
    lost = draw(st.sets(st.sampled_from(members), min_size=1, max_size=size - 1))
    survivors = [member for member in members if member not in lost]
    after = draw(layouts().filter(lambda after: after.world_size <= len(survivors)))
    new = tuple(draw(st.permutations(survivors))[: after.world_size])
    loss = Summons(generation=4, old=members, new=new, newcomers=(), layout="", lost=tuple(lost))
    return catalogue, declared(catalogue, layout, LAYERS), loss, after


def stands_of(catalogue, old, loss):
    """Where survivors stand that have a snapshot each, whole, and their wards' boxes of it."""
    found = keepers(catalogue, old, [0] * len(loss.old))
    return [
        Stand(
            step=NOW,
            torn=False,
            edge=1,
            turn=1,
            switches=0,
            notes=((NOTED, True, found.wards(loss.old.index(member)), True),),
        )
        for member in loss.survivors
    ]


def of_crossing(catalogue, old, loss, after, stands):
    """Both ownerships, and what the run goes on from, in the numbers of the crossing."""
    crossing, ranks = Crossing(generation=loss.generation, old=loss.survivors, new=loss.new), loss.old.index
    before = Ownership(old.layout.over(numbers(loss)), old.placements)
    kept = memory(stands, [ranks(member) for member in loss.survivors])
    by_rank = restore(catalogue, old, lost={ranks(member) for member in loss.lost}, kept=kept, files=(2,)).loss
    found = renumbered(by_rank, numbers(loss))
    assert found.lost == {*range(loss.holders, loss.holders + len(loss.lost))}
    for member, number in zip(loss.old, numbers(loss), strict=True):
        assert number in found.lost if member in loss.lost else number == crossing.holders.index(member)
    return before, declared(catalogue, after.over(crossing.over), LAYERS), found


@few
@given(losses())
def test_survivors_plan_what_is_left_in_their_own_numbers_and_the_lost_ones_behind_them(case):
    catalogue, old, loss, after = case
    before, new, found = of_crossing(catalogue, old, loss, after, stands_of(catalogue, old, loss))
    if found.files is not None:
        return  # more than the snapshots could stand: planned with files elsewhere

    schedule = keep_schedule(catalogue, 700)
    holders = range(num_holders(before, new))
    parts = [rank_plan(catalogue, before, new, rank, schedule, loss=found) for rank in holders]

    assert judge_all(catalogue, before, new, parts, loss=found).problems == ()
    made, wanted = recovered(catalogue, before, new, parts, found), right(catalogue, new, found.step)
    assert made.keys() == wanted.keys()
    assert all(np.array_equal(made[key], wanted[key]) for key in wanted)


@few
@given(losses())
def test_each_box_of_whoever_has_it_no_more_has_one_survivor_that_answers_for_it(case):
    catalogue, old, loss, after = case
    before, _, found = of_crossing(catalogue, old, loss, after, stands_of(catalogue, old, loss))
    own = {one.holder for one in found.kept if one.step == found.step and one.owner == one.holder}
    answered = {}
    for rank in range(len(loss.survivors)):
        pieces = dict.fromkeys(((t, s) for t, tensor in enumerate(catalogue) for s in range(len(tensor.states))), "own")
        elsewhere = lambda _owner, boxes: dict.fromkeys(boxes, "elsewhere")  # noqa: E731
        for owner, its in in_place_of_lost(catalogue, before, rank, found, pieces, elsewhere).items():
            for granule in its:
                assert (owner, granule) not in answered
                answered[owner, granule] = rank

    for owner in before.layout.ranks:
        for index, tensor in enumerate(catalogue):
            for at, state in enumerate(tensor.states):
                box = before.state_box(tensor, state, owner)
                there = box is not None and volume(box) > 0
                assert ((owner, (index, at)) in answered) == (there and owner not in own)


@few
@given(losses())
def test_what_a_torn_survivor_trains_with_counts_for_nothing(case):
    catalogue, old, loss, after = case
    stands = [replace(stand, notes=()) for stand in stands_of(catalogue, old, loss)]
    torn = [replace(stands[0], torn=True), *stands[1:]]

    of_all, of_torn = (of_crossing(catalogue, old, loss, after, told)[2] for told in (stands, torn))

    assert len(of_all.kept) == len(of_torn.kept) + 1
    assert of_torn.step <= of_all.step
