"""Unplanned loss: keepers, the newest step that is left, and the plan from what is left, over random worlds."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import toys
from tests.keepers import wrong_keepers
from tests.losses import OF_STEP, memory, newest_by_hand, recovered, right
from tests.plans.cases import LAYERS, catalogues, layouts
from tests.props.test_shelves import saved_by

from dynatrain.judge.judge import judge_all, judge_whole
from dynatrain.judge.shelves import judge_fetches
from dynatrain.layout.layout import Layout
from dynatrain.plan.build import rank_plan, whole_plan
from dynatrain.plan.errors import PlanError
from dynatrain.plan.keepers import keepers
from dynatrain.plan.loss import restore
from dynatrain.plan.plan import Kept, Loss
from dynatrain.plan.schedule import keep_schedule
from dynatrain.plan.shelves import reads_of_rest
from dynatrain.plan.table import table
from dynatrain.space.ownership import declared, num_holders

FSDP = Layout(axes=(("fsdp", 4),))
few = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@st.composite
def worlds(draw):
    """``(catalogue, ownership, nodes)`` of at least two ranks, on nodes of any sizes."""
    catalogue, layout = draw(catalogues()), draw(layouts().filter(lambda layout: layout.world_size > 1))
    nodes = sorted(draw(st.lists(st.integers(0, 3), min_size=layout.world_size, max_size=layout.world_size)))
    return catalogue, declared(catalogue, layout, LAYERS), nodes


@st.composite
def losses(draw):
    """A world that has lost some of its ranks, what there is of it, and the layout over whom that follows."""
    catalogue, old, nodes = draw(worlds())
    world = old.layout.world_size
    lost = draw(st.sets(st.sampled_from(range(world)), min_size=1, max_size=world - 1))
    kept = memory(world, 12, keepers(catalogue, old, nodes).keeper, draw(st.sampled_from([(), (8,), (8,), (4, 8)])))
    torn = draw(st.sets(st.sampled_from(range(len(kept))), max_size=2))  # snapshots that never quite arrived
    kept = [replace(one, complete=one.live or i not in torn) for i, one in enumerate(kept)]
    after = draw(layouts())
    survivors = sorted({*range(world)} - lost)
    stay = draw(st.permutations(survivors))[: draw(st.integers(0, min(len(survivors), after.world_size)))]
    members = draw(st.permutations([*stay, *range(world, world + after.world_size - len(stay))]))
    return catalogue, old, lost, kept, declared(catalogue, after.over(members), LAYERS)


def planned(catalogue, old, new, loss, **how):
    schedule = keep_schedule(catalogue, 700)
    return [rank_plan(catalogue, old, new, rank, schedule, loss=loss, **how) for rank in range(num_holders(old, new))]


@few
@given(worlds())
def test_each_box_that_exists_once_has_one_keeper_elsewhere_and_no_change_evens_them_out(world):
    catalogue, old, nodes = world
    found = keepers(catalogue, old, nodes)
    assert wrong_keepers(catalogue, old, nodes, found.keeper) == ()

    load = [found.kept_bytes(rank) for rank in old.layout.ranks]
    for rank in old.layout.ranks:
        if not (wards := found.wards(rank)):
            continue
        least = min(wards, key=lambda ward: found.sent_bytes[ward])
        for other in old.layout.ranks:
            if other != least and (nodes[other] != nodes[least] or len({*nodes}) == 1):
                assert load[rank] - found.sent_bytes[least] <= load[other]


@few
@given(worlds(), st.data())
def test_a_wrong_keeper_is_found(world, data):
    catalogue, old, nodes = world
    keeper = list(keepers(catalogue, old, nodes).keeper)
    rank = data.draw(st.sampled_from(old.layout.ranks))
    wrong = [rank, None] if keeper[rank] is not None else [(rank + 1) % len(keeper)]
    if keeper[rank] is not None and len({*nodes}) > 1:
        wrong += [other for other in old.layout.ranks if nodes[other] == nodes[rank]]
    keeper[rank] = data.draw(st.sampled_from(wrong))
    assert len(wrong_keepers(catalogue, old, nodes, keeper)) == 1


@few
@given(losses(), st.sampled_from([(), (8,), (6,)]), st.randoms())
def test_a_loss_is_made_good_to_the_newest_step_that_is_left_or_refused_by_name(case, files, chance):
    catalogue, old, lost, kept, new = case
    newest = newest_by_hand(catalogue, old, lost, kept, files)
    if newest is None:
        with pytest.raises(PlanError, match="of no step is everything left: step 12: nobody has"):
            restore(catalogue, old, lost=lost, kept=kept, files=files)
        return
    found = restore(catalogue, old, lost=lost, kept=kept, files=files)
    assert (found.loss.step, found.now) == (newest, 12)
    assert [gap.step for gap in found.passed] == sorted({one.step for one in kept if one.step > newest}, reverse=True)
    shuffled = chance.sample(kept, len(kept))
    assert restore(catalogue, old, lost=sorted(lost, reverse=True), kept=shuffled, files=files) == found

    parts = planned(catalogue, old, new, found.loss)
    shelf = saved_by(catalogue, old)
    fetches = {}
    if found.loss.files is not None:
        fetches = {
            rank: reads_of_rest(catalogue, shelf, old, new, rank, found.loss) for rank in range(num_holders(old, new))
        }
    assert judge_all(catalogue, old, new, parts, loss=found.loss, fetches=fetches).problems == ()
    assert all(judge_fetches(catalogue, shelf, one) == () for one in fetches.values())
    got, wanted = recovered(catalogue, old, new, parts, found.loss, fetches, shelf), right(catalogue, new, newest)
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_array_equal(got[key], value)

    columns = whole_plan(catalogue, old, new, keep_schedule(catalogue, 700), loss=found.loss)
    assert judge_whole(catalogue, old, new, columns, loss=found.loss, fetches=fetches).problems == ()
    moves = [move for part in parts for move in (*part.receives, *part.relays)]
    assert {*_rows(columns.moves)} == {*_rows(table(moves))}
    assert not lost & {rank for move in moves for rank in (move.src, move.dst)}


def _rows(moves):
    groups = [moves.groups[group] for group in moves.group]
    low, high = moves.low.tolist(), moves.high.tolist()
    return zip(moves.tensor, groups, map(tuple, low), map(tuple, high), moves.src, moves.dst, strict=True)


@few
@given(losses())
def test_a_plan_that_knows_nothing_of_the_loss_is_refused_where_it_asks_the_lost(case):
    catalogue, old, lost, kept, new = case
    truth = Loss(lost=frozenset(lost), step=12, kept=tuple(kept))
    parts = planned(catalogue, old, new, None)
    asked = {move.src for part in parts for move in part.receives} & lost
    said = judge_all(catalogue, old, new, parts, loss=truth).problems
    assert any("comes from a rank that is lost" in problem for problem in said) == bool(asked)


@few
@given(losses())
def test_a_stale_snapshot_that_passes_for_the_present_is_found(case):
    catalogue, old, lost, kept, new = case
    live = tuple(one for one in kept if one.live)
    snapshots = [one for one in kept if one.step == 8]
    believed, truth = (
        Loss(lost=frozenset(lost), step=12, kept=(*live, *(replace(one, step=step) for one in snapshots)))
        for step in (12, 8)
    )
    parts = planned(catalogue, old, new, believed)
    stale = any(
        not any(own.holder == move.src and _within(catalogue, old, own, move) for own in live)
        for part in parts
        for move in (*part.receives, *part.relays)
    )
    said = judge_all(catalogue, old, new, parts, loss=truth).problems
    assert any("is not whole, or of another step than 12" in problem for problem in said) == stale
    assert not any("is not among what" in problem for problem in said)
    if stale:
        got, wanted = recovered(catalogue, old, new, parts, truth), right(catalogue, new, 12)
        assert any((got[key] % OF_STEP == wanted[key] % OF_STEP)[got[key] < 12 * OF_STEP].any() for key in wanted)


def _within(catalogue, old, own, move):
    tensor = catalogue[move.tensor]
    box = old.state_box(tensor, tensor.states[move.states[0]], own.owner)
    return box is not None and all(c <= a and b <= d for (a, b), (c, d) in zip(move.box, box, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_a_decoder_that_lost_a_node_goes_on_in_another_layout(seed):
    pick = random.Random(seed).choice
    toy = toys.toy(pick)
    before, after = toys.layout(pick, toy, 8), toys.layout(pick, toy, pick((4, 6, 8)))
    catalogue = toys.catalogue(toy)
    old = declared(catalogue, before, toy.layers)
    members = [*range(4), *range(8, 12)][: after.world_size]  # spares in the places of the lost
    new = declared(catalogue, after.over(members), toy.layers)
    keeper = keepers(catalogue, old, [0] * 4 + [1] * 4).keeper
    found = restore(catalogue, old, lost={4, 5, 6, 7}, kept=memory(8, 30, keeper, (20,)), files=(10,))
    shelf = saved_by(catalogue, old)
    ranks = range(num_holders(old, new))
    files = found.loss.files is not None
    fetches = {r: reads_of_rest(catalogue, shelf, old, new, r, found.loss) if files else () for r in ranks}
    plan = whole_plan(catalogue, old, new, keep_schedule(catalogue, 1 << 14), loss=found.loss)
    assert judge_whole(catalogue, old, new, plan, loss=found.loss, fetches=fetches).problems == ()


def test_files_of_the_snapshots_step_are_read_only_where_memory_has_nothing():
    catalogue = toys.catalogue(toys.toy(random.Random(3).choice))
    old = declared(catalogue, FSDP, 9)
    kept = [Kept(holder=rank, owner=rank, step=12, live=True) for rank in range(4)]
    kept += [Kept(holder=rank, owner=rank, step=8) for rank in range(4)]
    found = restore(catalogue, old, lost={2}, kept=kept, files=(8,))
    new = declared(catalogue, FSDP.over((0, 1, 4, 3)), 9)
    shelf = saved_by(catalogue, old)
    read = {rank: reads_of_rest(catalogue, shelf, old, new, rank, found.loss) for rank in range(5)}
    assert (found.loss.step, found.loss.files) == (8, 8)
    assert [rank for rank, fetches in read.items() if fetches] == [4]
    parts = planned(catalogue, old, new, found.loss)
    said = judge_all(catalogue, old, new, parts, loss=replace(found.loss, files=6), fetches=read).problems
    assert said == ("files of step 6 are read, and the run goes on from step 8",)
    assert "elements missing" in judge_all(catalogue, old, new, parts, loss=found.loss).problems[0]
