from dataclasses import astuple

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.plans.cases import LAYERS, catalogues, numbered
from tests.plans.materialize import brute_force_holders, expected, materialize

from dynatrain.judge.judge import judge_all, judge_rank, judge_whole
from dynatrain.judge.verdict import Coverage, Verdict
from dynatrain.plan.build import rank_plan, whole_plan
from dynatrain.plan.errors import PlanError
from dynatrain.plan.hashes import plan_hash, received_hash, sent_hash
from dynatrain.plan.mesh import Mesh
from dynatrain.plan.schedule import (
    STAGING_BYTES,
    default_budget,
    keep_schedule,
    predicted_peak,
    tight_schedule,
)
from dynatrain.plan.sources import Grid
from dynatrain.plan.storage import alike, storage
from dynatrain.plan.summary import ledger, summarise
from dynatrain.plan.table import table
from dynatrain.space.box import intersect, volume
from dynatrain.space.ownership import declared, num_holders
from dynatrain.space.tensor import ITEMSIZE

WAYS = [("keep", False), ("tight", False), ("keep", True), ("tight", True)]
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def all_parts(catalogue, old, new, schedule, **how):
    return [rank_plan(catalogue, old, new, rank, schedule, **how) for rank in range(num_holders(old, new))]


def sides(catalogue, before, after):
    return declared(catalogue, before, LAYERS), declared(catalogue, after, LAYERS)


def every_state(catalogue):
    return [(tensor, state) for tensor in catalogue for state in tensor.states]


def together(verdicts):
    """The verdict on several parts, judged apart: coverage added up, all problems, each once."""
    total = {}
    for verdict in verdicts:
        for kind, more in verdict.coverage.items():
            sums = map(sum, zip(astuple(total.get(kind, Coverage())), astuple(more), strict=True))
            total[kind] = Coverage(**dict(zip(Coverage.__slots__, sums, strict=True)))
    problems = dict.fromkeys(problem for verdict in verdicts for problem in verdict.problems)
    return Verdict(coverage=total, problems=tuple(problems))


def tightest(stored, budget):
    """A tight schedule within ``budget``, or within the one that the refusal names."""
    try:
        return budget, tight_schedule(stored, budget)
    except PlanError as refusal:
        enough = int(str(refusal).split("A budget of ")[1].split()[0])
        return enough, tight_schedule(stored, enough)


@few
@given(catalogues(), numbered(), numbered(), st.sampled_from([None, 1, 2, 3]), st.sampled_from(WAYS))
def test_a_plan_brings_every_stamp_to_its_place_and_the_judge_accepts_it(catalogue, before, after, ranks_per_node, way):
    mode, veto = way
    old, new = sides(catalogue, before, after)
    adoptable = (lambda tensor: tensor % 2 == 0) if veto else alike(catalogue, old, new)
    stored = storage(catalogue, old, new, adoptable=adoptable)
    budget = default_budget(stored)
    schedule = keep_schedule(catalogue, 700)
    if mode == "tight":
        budget, schedule = tightest(stored, budget)
    parts = all_parts(catalogue, old, new, schedule, ranks_per_node=ranks_per_node, adoptable=adoptable)

    found = materialize(catalogue, old, new, parts)
    wanted = expected(catalogue, new, len(parts))
    assert found.keys() == wanted.keys()
    for key, piece in wanted.items():
        np.testing.assert_array_equal(found[key], piece)

    verdict = judge_all(catalogue, old, new, parts, budget_bytes=budget)
    assert verdict.problems == ()
    assert all(count.complete for count in verdict.coverage.values())
    apart = together([judge_rank(catalogue, old, new, part, budget_bytes=budget) for part in parts])
    assert apart == verdict


@few
@given(catalogues(), numbered(), numbered(), st.sampled_from([None, 2]))
def test_the_whole_plan_is_the_sum_of_the_ranks_parts(catalogue, before, after, ranks_per_node):
    old, new = sides(catalogue, before, after)
    schedule = keep_schedule(catalogue, 1 << 20)
    parts = all_parts(catalogue, old, new, schedule, ranks_per_node=ranks_per_node)
    whole = whole_plan(catalogue, old, new, schedule, ranks_per_node=ranks_per_node)

    assert judge_whole(catalogue, old, new, whole) == judge_all(catalogue, old, new, parts)
    total = plan_hash(catalogue, whole.moves)
    assert sum(sent_hash(catalogue, part) for part in parts) % 2**64 == total
    assert sum(received_hash(catalogue, part) for part in parts) % 2**64 == total
    assert len(whole.adopted_rank) == len(
        {
            (tensor, rank, group)
            for tensor, group, rank in zip(
                whole.adopted_tensor.tolist(), whole.adopted_group.tolist(), whole.adopted_rank.tolist(), strict=True
            )
        }
    )
    sent = table(move for part in parts for move in part.sends)
    assert ledger(catalogue, sent) == ledger(catalogue, whole.moves)


@few
@given(catalogues(), numbered(), numbered(), st.sampled_from([None, 2]))
def test_a_source_holds_the_box_and_is_the_nearest_that_does(catalogue, before, after, ranks_per_node):
    old, new = sides(catalogue, before, after)
    parts = all_parts(catalogue, old, new, keep_schedule(catalogue, 1), ranks_per_node=ranks_per_node)
    for part in parts:
        for move in part.receives:
            if move.box:
                tensor = catalogue[move.tensor]
                holders = brute_force_holders(tensor, tensor.states[move.states[0]], move.box, old)
                assert move.src in holders
                assert part.rank not in holders
                if ranks_per_node is not None:
                    near = [rank for rank in holders if rank // ranks_per_node == part.rank // ranks_per_node]
                    assert move.src in (near or holders)


@few
@given(catalogues(), numbered(), numbered())
def test_cells_found_by_division_are_those_found_by_looking_at_every_rank(catalogue, before, after):
    old, new = sides(catalogue, before, after)
    for tensor, state in every_state(catalogue):
        grid = Grid(tensor.state_shape(state), old.placed(tensor, state), Mesh(before))
        for rank in after.ranks:
            box = new.state_box(tensor, state, rank)
            if box is None:
                continue
            slow = {
                (owner, common)
                for owner in before.ranks
                if (piece := old.state_box(tensor, state, owner)) is not None
                and (common := intersect(piece, box)) is not None
            }
            fast = {(owner, common) for cell, common in grid.meeting(box) for owner in grid.owners(cell)}
            assert fast == slow


@few
@given(catalogues(), numbered())
def test_each_copy_of_a_state_has_every_element_once(catalogue, where):
    own = declared(catalogue, where, LAYERS)
    for tensor, state in every_state(catalogue):
        times = np.zeros((own.copies(tensor, state), *tensor.state_shape(state)), np.int64)
        for rank in where.ranks:
            box = own.state_box(tensor, state, rank)
            if box is not None:
                times[own.copy_index(tensor, rank, state), *(slice(*ends) for ends in box)] += 1
        assert (times == 1).all()


@few
@given(catalogues(), numbered(), numbered())
def test_bytes_and_floor_of_a_summary_hold_together(catalogue, before, after):
    old, new = sides(catalogue, before, after)
    stored = storage(catalogue, old, new)
    plan = whole_plan(catalogue, old, new, keep_schedule(catalogue, 1 << 20))
    summary = summarise(catalogue, old, new, plan, stored)
    verdict = judge_whole(catalogue, old, new, plan)

    written = summary.moved + sum(summary.relaid) + sum(summary.adopted)
    assert written == sum(count.written for count in verdict.coverage.values())
    assert summary.moved == sum(summary.bytes_out) == sum(summary.pairs.values())
    assert summary.floor_link <= max(*summary.bytes_in, *summary.bytes_out, 0)
    assert summary.floor_machine == summary.moved + sum(summary.relaid)


@few
@given(catalogues(), numbered(), numbered(), st.integers(0, 3))
def test_a_tight_order_holds_its_bound_or_names_a_budget_that_does(catalogue, before, after, more):
    old, new = sides(catalogue, before, after)
    stored = storage(catalogue, old, new)
    budget, schedule = tightest(stored, STAGING_BYTES + int(stored.taken.max()) * (4 + more) // 4)
    assert sorted(sum(schedule.rounds, ())) == list(stored.granules)
    limit = np.maximum(stored.old, stored.new) + budget - STAGING_BYTES
    assert (predicted_peak(stored, schedule) <= limit).all()


@few
@given(catalogues(), numbered())
def test_storage_is_the_boxes_and_pads_parameters_to_the_largest_shard(catalogue, where):
    own = declared(catalogue, where, LAYERS)
    stored = storage(catalogue, own, own)
    for rank in where.ranks:
        total = 0
        for tensor in catalogue:
            box = own.box(tensor, rank)
            if box is None:
                continue
            group = [
                other
                for peer in where.ranks
                if all(
                    where.index(axis, peer) == where.index(axis, rank)
                    for axis in ("pp", *(("ep", "etp") if "experts" in tensor.name else ("tp",)))
                )
                and (other := own.box(tensor, peer)) is not None
            ]
            for state in tensor.states:
                elements = volume(state.box(box, tensor.shape))
                if state.name == "param":
                    elements = max(volume(piece) for piece in group)
                total += elements * ITEMSIZE[state.dtype]
        assert stored.old[rank] == stored.new[rank] == total
