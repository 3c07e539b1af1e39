"""Fused and padded tensors: where their parts lie in every layout, and what plans and their judge make of that."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from tests.plans.cases import layout
from tests.plans.materialize import expected, materialize

from dynatrain.judge.holdings import holdings
from dynatrain.judge.judge import judge_all, judge_whole
from dynatrain.layout.text import parse_layout
from dynatrain.plan.build import rank_plan, whole_plan
from dynatrain.plan.padding import fsdp_pads
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
            start, stop, held, _ = slot.spans[index]
            assert (local[slot.first : slot.first + slot.rows] == rows[start:stop]).all()
            assert slot.rows == held == stop - start
        assert sum(slot.rows for slot in slots) == len(local)
        assert sum(slot.spans[index][3] for slot in slots) == room


@pytest.mark.parametrize(("tp", "fsdp"), WAYS)
def test_real_rows_are_shared_out_as_the_padded_tensor_is_and_each_is_somebodys(tp, fsdp):
    stored = -(-11 // (4 * tp)) * 4 * tp
    _, ranks = lies(Segments(padded={"head": 11}), "head.weight", (stored, 5), tp, fsdp)
    spans = ranks[0][0].spans
    assert [row for start, stop, *_ in spans for row in range(start, stop)] == list(range(11))
    assert {slots[0].shape for slots in ranks} == {(11, 5)}
    assert all(room == -(-stored // tp // fsdp) or fsdp == 1 for *_, room in spans)
    parts = [np.array_split(np.arange(stored), tp)[t] for t in range(tp)]
    cut = [part[i * -(-len(part) // fsdp) :][: -(-len(part) // fsdp)] for part in parts for i in range(fsdp)]
    assert [local for _, _, local, _ in spans] == [len(rows) for rows in cut]


STACK = Segments(fused={"experts.gate_up_proj": {"experts.gate_proj": 12, "experts.up_proj": 12}})
STACKED = ("fsdp4", "fsdp4.ep2", "fsdp4.ep2.etp2", "fsdp2.tp2.etp4", "dp2.fsdp4.etp2", "fsdp6.ep3", "fsdp3.ep3")
IN_STACK = (*STATES[:2], State("row", "float32", reduced=(2,)), State("all", "float32", reduced=(0,)))
IN_STACK += (State("scale", "float32", block=3),)


def stacked(text, dim):
    """A stack of six experts, gate and up in one, its efsdp ranks cutting ``dim``; and the live tensor's shape."""
    here, shape = parse_layout(text), (6, 24, 4)
    cuts = tuple((axis, at) for axis, at in (("ep", 0), ("etp", 1), ("efsdp", dim)) if here.ways(axis) > 1)
    ways = {axis: here.ways(axis) for axis, _ in cuts}
    ranks = []
    for rank in range(here.world_size):
        index = 0
        for axis in (axis for axis, at in cuts if at == 1):
            index = index * ways[axis] + here.index(axis, rank)
        ranks.append(STACK.slots("layers.0.experts.gate_up_proj", shape, cuts, ways, index))
    catalogue = tuple(Tensor(s.name, s.shape, cuts, (), IN_STACK, s.name, s.within) for s in ranks[0])
    placements = {slot.name: Placement(cuts, (0,), slot.spans, slot.along) for slot in ranks[0]}
    return catalogue, Ownership(here, placements), ranks


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("text", STACKED)
def test_segments_inside_a_stack_lie_where_the_stack_that_is_really_cut_has_their_rows(text, dim):
    """Each expert's gate and up are cut by etp one by one, and by efsdp as what etp left of both."""
    catalogue, owners, ranks = stacked(text, dim)
    here, (gate, up) = owners.layout, np.arange(2 * 6 * 12 * 4).reshape(2, 6, 12, 4)
    for rank, slots in enumerate(ranks):
        parts = [np.split(rows, here.ways("etp"), 1)[here.index("etp", rank)] for rows in (gate, up)]
        local = np.split(np.concatenate(parts, 1), here.ways("ep"))[here.index("ep", rank)]
        size = -(-local.shape[dim] // here.ways("efsdp"))
        local = np.split(local, [i * size for i in range(1, here.ways("efsdp"))], dim)[here.index("efsdp", rank)]
        for tensor, slot, whole in zip(catalogue, slots, (gate, up), strict=True):
            held = whole[tuple(slice(*ends) for ends in owners.box(tensor, rank))]
            assert np.array_equal(local[:, slot.first : slot.first + slot.rows], held)
        experts, rows, width = local.shape
        elements = [local.size, experts * rows, rows * width, experts * rows * 2]  # two blocks in a row of four
        elements.append(local.size // max(1, local.shape[dim]) * size if local.size else size * rows * width)
        assert storage(catalogue, owners, owners).new[rank] == 4 * sum(elements)


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


@pytest.mark.parametrize(("tp", "fsdp"), WAYS)
def test_moments_of_padded_rows_are_counted_as_what_the_optimizer_makes_and_parameters_as_fsdp_pads(tp, fsdp):
    catalogue, owners = owned(tp, fsdp)
    stored = -(-11 // (4 * tp)) * 4
    room = -(-stored // fsdp)
    predicted = storage(catalogue[-1:], owners, owners)
    held = holdings(catalogue[-1:], owners, tp * fsdp).storage(catalogue[-1:], [(0, 0), (0, 1), (0, 2)], fsdp_pads)
    for rank in range(tp * fsdp):
        rows = len(range(stored)[rank // tp * room :][:room])
        assert predicted.new[rank] == 4 * (5 * room + 5 * rows + rows)
        assert held[:, rank].tolist() == [4 * 5 * room, 4 * 5 * rows, 4 * rows]


def check_plan(catalogue, old, new, mode):
    """Plan, judge, carry out on stamps, and compare."""
    table = storage(catalogue, old, new, adoptable=lambda _index: False)
    room, schedule = None, keep_schedule(catalogue, 1000)
    if mode == "tight":
        room = default_budget(table) - STAGING_BYTES
        schedule = tight_schedule(table, default_budget(table))
        assert (predicted_peak(table, schedule) <= np.maximum(table.old, table.new) + room).all()
    world = max(old.layout.world_size, new.layout.world_size)
    parts = [rank_plan(catalogue, old, new, rank, schedule, adoptable=lambda _index: False) for rank in range(world)]
    assert judge_all(catalogue, old, new, parts, budget_bytes=room).problems == ()
    whole = whole_plan(catalogue, old, new, schedule, adoptable=lambda _index: False)
    assert judge_whole(catalogue, old, new, whole, budget_bytes=room).problems == ()
    landed = materialize(catalogue, old, new, parts)
    for key, values in expected(catalogue, new, world).items():
        assert np.array_equal(landed[key], values)


@pytest.mark.parametrize("mode", ["keep", "tight"])
def test_every_plan_between_such_layouts_passes_the_judge_and_lands_right(mode):
    for one, other in itertools.product(WAYS[:8:3] + WAYS[5:6], repeat=2):
        (catalogue, old), (_, new) = owned(*one), owned(*other)
        check_plan(catalogue, old, new, mode)


@pytest.mark.parametrize("mode", ["keep", "tight"])
def test_every_plan_between_stacks_passes_the_judge_and_lands_right(mode):
    cases = list(zip(STACKED[:6], (0, 1, 2, 1, 0, 2), strict=True))
    for one, other in itertools.pairwise((*cases, cases[2], cases[0], cases[4])):
        (catalogue, old, _), (_, new, _) = stacked(*one), stacked(*other)
        check_plan(catalogue, old, new, mode)


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
