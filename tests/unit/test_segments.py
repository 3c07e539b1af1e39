"""Fused and padded tensors: where their parts lie in every layout, and what plans and their judge make of that."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from tests.plans.cases import layout
from tests.plans.materialize import expected, materialize

from dynatrain.judge.judge import judge_all, judge_whole
from dynatrain.plan.build import rank_plan, whole_plan
from dynatrain.plan.schedule import STAGING_BYTES, default_budget, keep_schedule, predicted_peak, tight_schedule
from dynatrain.plan.storage import storage
from dynatrain.space.ownership import Ownership, Placement
from dynatrain.space.tensor import State, Tensor
from dynatrain.train.segments import Segments

WAYS = [(tp, fsdp) for tp in (1, 2, 3) for fsdp in (1, 2, 3, 4)]
QKV = Segments(fused={"qkv": {"q": (24, 12), "k": (6, 6), "v": 6}})
STATES = (State("param", "float32"), State("exp_avg", "float32"), State("row", "float32", reduced=(1,)))


def lies(segments, name, shape, tp, fsdp):
    """The slots of each rank under one layout, its tp index running fastest."""
    cuts = tuple((axis, 0) for axis, ways in (("tp", tp), ("fsdp", fsdp)) if ways > 1)
    ways = {"tp": tp, "fsdp": fsdp}
    return cuts, [segments.slots(name, shape, cuts, ways, t * fsdp + f) for f in range(fsdp) for t in range(tp)]


@pytest.mark.parametrize(("tp", "fsdp"), WAYS)
def test_segments_lie_where_a_fused_tensor_that_is_really_cut_has_their_rows(tp, fsdp):
    segments = [np.arange(100 * i, 100 * i + rows) for i, rows in enumerate((24, 6, 6))]
    _, ranks = lies(QKV, "layers.0.qkv.weight", (36, 5), tp, fsdp)
    for rank, slots in enumerate(ranks):
        stacked = np.concatenate([np.split(rows, tp)[rank % tp] for rows in segments])
        room = -(-len(stacked) // fsdp)
        local = stacked[rank // tp * room :][:room]
        assert [slot.name for slot in slots] == [f"layers.0.{name}.weight" for name in "qkv"]
        index = rank % tp * fsdp + rank // tp
        for slot, rows in zip(slots, segments, strict=True):
            start, stop, _ = slot.spans[index]
            assert (local[slot.first : slot.first + slot.rows] == rows[start:stop]).all()
            assert slot.rows == stop - start
        assert sum(slot.rows for slot in slots) == len(local)
        assert sum(slot.spans[index][2] for slot in slots) == room


@pytest.mark.parametrize(("tp", "fsdp"), WAYS)
def test_real_rows_are_shared_out_as_the_padded_tensor_is_and_each_is_somebodys(tp, fsdp):
    stored = -(-11 // (4 * tp)) * 4 * tp
    _, ranks = lies(Segments(padded={"head": 11}), "head.weight", (stored, 5), tp, fsdp)
    spans = ranks[0][0].spans
    assert [row for start, stop, _ in spans for row in range(start, stop)] == list(range(11))
    assert {slots[0].shape for slots in ranks} == {(11, 5)}
    assert all(room == -(-stored // tp // fsdp) or fsdp == 1 for _, _, room in spans)


def owned(tp, fsdp):
    """Two fused layers and a padded head under one layout."""
    catalogue, placements = [], {}
    for name, shape, segments in (
        ("layers.0.qkv", (36, 5), QKV),
        ("layers.1.qkv", (36, 5), QKV),
        ("head", (-(-11 // (4 * tp)) * 4 * tp, 5), Segments(padded={"head": 11})),
    ):
        cuts, ranks = lies(segments, name, shape, tp, fsdp)
        for slot in ranks[0]:
            catalogue.append(Tensor(slot.name, slot.shape, cuts, (), STATES, name, slot.within))
            placements[slot.name] = Placement(cuts, (0,), slot.spans)
    return tuple(catalogue), Ownership(layout(fsdp=fsdp, tp=tp), placements)


@pytest.mark.parametrize("mode", ["keep", "tight"])
def test_every_plan_between_such_layouts_passes_the_judge_and_lands_right(mode):
    for one, other in itertools.product(WAYS[:8:3] + WAYS[5:6], repeat=2):
        (catalogue, old), (_, new) = owned(*one), owned(*other)
        table = storage(catalogue, old, new, adoptable=lambda _index: False)
        room, schedule = None, keep_schedule(catalogue, 1000)
        if mode == "tight":
            room = default_budget(table) - STAGING_BYTES
            schedule = tight_schedule(table, default_budget(table))
            assert (predicted_peak(table, schedule) <= np.maximum(table.old, table.new) + room).all()
        world = max(old.layout.world_size, new.layout.world_size)
        parts = [
            rank_plan(catalogue, old, new, rank, schedule, adoptable=lambda _index: False) for rank in range(world)
        ]
        assert judge_all(catalogue, old, new, parts, budget_bytes=room).problems == ()
        whole = whole_plan(catalogue, old, new, schedule, adoptable=lambda _index: False)
        assert judge_whole(catalogue, old, new, whole, budget_bytes=room).problems == ()
        landed = materialize(catalogue, old, new, parts)
        for key, values in expected(catalogue, new, world).items():
            assert np.array_equal(landed[key], values)


def test_a_row_of_padding_that_leaks_into_the_real_ones_is_named():
    """The head has 11 rows; under tp2 it is stored as 16, of which the second rank has rows 8 to 11 and 5 of nobody."""
    (catalogue, old), (_, new) = owned(1, 4), owned(2, 1)
    head = next(index for index, tensor in enumerate(catalogue) if tensor.name == "head")
    schedule = keep_schedule(catalogue, 1000)
    parts = [rank_plan(catalogue, old, new, rank, schedule, adoptable=lambda _: False) for rank in range(4)]

    def longer(move):
        rows, *rest = move.box or ((0, 0),)
        leaks = move.tensor == head and rows[1] == 11 and move.box
        return replace(move, box=((rows[0], 12), *rest)) if leaks else move

    wrong = [
        replace(part, **{name: tuple(map(longer, getattr(part, name))) for name in ("sends", "receives", "relays")})
        for part in parts
    ]
    assert judge_all(catalogue, old, new, parts).ok
    found = "\n".join(judge_all(catalogue, old, new, wrong).problems)
    assert re.search(r"head\.param \[\d+:12, 0:5\] on rank 1 is not within the piece that the target needs", found)


def test_segments_that_are_exchanged_in_a_plan_or_handed_over_apart_are_caught():
    (catalogue, old), (_, new) = owned(1, 4), owned(2, 2)
    table = storage(catalogue, old, new)
    schedule = tight_schedule(table, default_budget(table))
    budget = default_budget(table) - STAGING_BYTES
    parts = [rank_plan(catalogue, old, new, rank, schedule) for rank in range(4)]

    def exchange(moves):
        return tuple(replace(move, tensor={1: 2, 2: 1}.get(move.tensor, move.tensor)) for move in moves)

    wrong = [replace(part, sends=exchange(part.sends)) for part in parts]
    found = "\n".join(judge_all(catalogue, old, new, wrong, budget_bytes=budget).problems)
    assert re.search(r"layers\.0\.k\.param \[.*\] on rank \d is sent but not received", found)

    alone = replace(schedule, rounds=tuple((granule,) for granules in schedule.rounds for granule in granules))
    apart = [rank_plan(catalogue, old, new, rank, alone) for rank in range(4)]
    problems = judge_all(catalogue, old, new, apart, budget_bytes=1 << 20).problems
    assert any("state 0 of the segments of layers.0.qkv is handed over in rounds" in problem for problem in problems)
