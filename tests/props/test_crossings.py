"""Plans between worlds with other members: everybody is counted in one numbering, of holders."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.plans.cases import LAYERS, catalogues, layouts, numbered
from tests.plans.materialize import expected, materialize

from dynatrain.judge.judge import judge_all
from dynatrain.plan.build import rank_plan, whole_plan
from dynatrain.plan.mend import mend_plan
from dynatrain.plan.schedule import keep_schedule
from dynatrain.plan.storage import alike, storage
from dynatrain.plan.summary import summarise
from dynatrain.space.box import volume
from dynatrain.space.ownership import declared, num_holders

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def crossings(draw):
    """``(before, after, members)``: old ranks are holders 0 .. n - 1, some stay in any order, newcomers follow them."""
    before, after = draw(layouts()), draw(layouts())
    n, size = before.world_size, after.world_size
    stay = draw(st.integers(0, min(n, size)))
    stayers = draw(st.permutations(range(n)))[:stay]
    return before, after, tuple(draw(st.permutations([*stayers, *range(n, n + size - stay)])))


@few
@given(catalogues(), crossings())
def test_leavers_end_with_nothing_and_newcomers_give_nothing(catalogue, crossing):
    before, after, members = crossing
    old, new = declared(catalogue, before, LAYERS), declared(catalogue, after.over(members), LAYERS)
    adoptable = alike(catalogue, old, new)
    stored = storage(catalogue, old, new, adoptable=adoptable)
    plan = whole_plan(catalogue, old, new, keep_schedule(catalogue, 1 << 20), adoptable=adoptable)
    summary = summarise(catalogue, old, new, plan, stored)

    everybody = range(num_holders(old, new))
    assert len(summary.bytes_in) == len(stored.old) == max(before.world_size, *(one + 1 for one in members))
    for gone in set(everybody) - {*members}:
        assert (summary.bytes_in[gone], summary.relaid[gone], summary.adopted[gone], stored.new[gone]) == (0, 0, 0, 0)
    for come in set(everybody) - {*before.ranks}:
        assert (summary.bytes_out[come], summary.relaid[come], summary.adopted[come], stored.old[come]) == (0, 0, 0, 0)
    assert max(summary.bytes_in) <= summary.floor_link <= max(*summary.bytes_in, *summary.bytes_out)

    # What the ranks of the new world hold does not depend on who they are.
    alone = storage(catalogue, declared(catalogue, after, LAYERS), declared(catalogue, after, LAYERS))
    assert [int(stored.new[holder]) for holder in members] == alone.new.tolist()


@few
@given(catalogues(), crossings(), st.data())
def test_two_holders_taken_for_each_other_are_found(catalogue, crossing, data):
    before, after, members = crossing
    old, new = declared(catalogue, before, LAYERS), declared(catalogue, after.over(members), LAYERS)
    everybody = range(num_holders(old, new))
    one, other = data.draw(st.permutations(everybody))[:2] if len(everybody) > 1 else (0, 0)
    swap = {holder: holder for holder in everybody} | {one: other, other: one}
    side = data.draw(st.sampled_from(["old", "new"]))
    truth = {"old": old, "new": new}
    truth[side] = declared(catalogue, truth[side].layout.over(swap), LAYERS)
    parts = [rank_plan(catalogue, old, new, rank, keep_schedule(catalogue, 700)) for rank in everybody]

    wanted = expected(catalogue, truth["new"], len(parts))
    same = {"old": old, "new": new}[side]
    harmless = pieces(catalogue, same, one) == pieces(catalogue, same, other)
    assert (judge_all(catalogue, truth["old"], truth["new"], parts).problems == ()) == harmless
    if side == "new":
        found = materialize(catalogue, old, new, parts)
        right = found.keys() == wanted.keys() and all(
            found[key].shape == piece.shape and np.array_equal(found[key], piece) for key, piece in wanted.items()
        )
        assert right == harmless


def pieces(catalogue, ownership, holder):
    return [ownership.state_box(tensor, state, holder) for tensor in catalogue for state in tensor.states]


@few
@given(catalogues(), numbered(), st.data())
def test_every_piece_of_an_unequal_copy_is_mended_from_the_first_whoever_holds_them(catalogue, where, data):
    own = declared(catalogue, where, LAYERS)
    wrong = [
        ((index, at), copy)
        for index, tensor in enumerate(catalogue)
        for at, state in enumerate(tensor.states)
        for copy in range(1, own.copies(tensor, state))
    ]
    unequal = data.draw(st.lists(st.sampled_from(wrong), max_size=5, unique=True)) if wrong else []
    parts = [mend_plan(catalogue, own, rank, unequal) for rank in where.ranks]
    sent = {move for part in parts for move in part.sends}
    assert sent == {move for part in parts for move in part.receives}

    for rank in where.ranks:
        needed = {
            (granule, own.state_box(tensor, state, rank))
            for granule, copy in unequal
            for tensor in (catalogue[granule[0]],)
            for state in (tensor.states[granule[1]],)
            if (box := own.state_box(tensor, state, rank)) is not None
            and volume(box)
            and own.copy_index(tensor, rank, state) == copy
        }
        assert {((move.tensor, move.states[0]), move.box) for move in sent if move.dst == rank} == needed
    for move in sent:
        tensor, state = catalogue[move.tensor], catalogue[move.tensor].states[move.states[0]]
        assert own.state_box(tensor, state, move.src) == move.box
        assert own.copy_index(tensor, move.src, state) == 0
