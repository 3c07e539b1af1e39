"""Each kind of fault, planted in a plan that is otherwise right, is caught and named."""

import itertools
import re
from dataclasses import replace

import pytest
from tests.plans.cases import LAYERS, layout, small

from dynatrain.judge.judge import judge_all, judge_rank, judge_whole
from dynatrain.plan.build import rank_plan, whole_plan
from dynatrain.plan.plan import Move, Schedule
from dynatrain.plan.schedule import STAGING_BYTES, default_budget, keep_schedule, tight_schedule
from dynatrain.plan.storage import storage
from dynatrain.space.ownership import Ownership, declared

CATALOGUE = small(width=8, inner=12, vocabulary=16)
OLD = declared(CATALOGUE, layout(fsdp=2, tp=2), LAYERS)
NEW = declared(CATALOGUE, layout(pp=2, fsdp=2), LAYERS)
UP = 1  # layers.0.up


@pytest.fixture
def parts():
    schedule = keep_schedule(CATALOGUE, 1000)
    return [rank_plan(CATALOGUE, OLD, NEW, rank, schedule) for rank in range(4)]


def problems(parts, **how):
    return "\n".join(judge_all(CATALOGUE, OLD, NEW, parts, **how).problems)


def first_move(parts, tensor=UP):
    return next(move for part in parts for move in part.receives if move.tensor == tensor and len(move.states) > 1)


def change(parts, old, *new):
    """The parts with one move replaced, at both ends."""

    def swap(moves):
        return tuple(found for move in moves for found in (new if move == old else (move,)))

    return [replace(part, sends=swap(part.sends), receives=swap(part.receives)) for part in parts]


def everywhere(parts, turned):
    """The parts with ``turned(move)`` in the place of every move: some moves, or none."""
    return [
        replace(
            part,
            **{
                name: tuple(new for move in getattr(part, name) for new in turned(move))
                for name in ("sends", "receives", "relays")
            },
        )
        for part in parts
    ]


def shifted(box, rows):
    return ((box[0][0] + rows, box[0][1] + rows), *box[1:])


def test_the_plan_without_a_fault_is_accepted(parts):
    assert problems(parts) == ""


@pytest.mark.parametrize("rows", [-1, 1])
def test_a_box_shifted_by_a_row_is_named(parts, rows):
    move = first_move(parts)
    found = problems(change(parts, move, replace(move, box=shifted(move.box, rows))))
    assert re.search(rf"layers\.0\.up\.param \[.*\] on rank {move.dst}: \d+ of \d+ elements missing", found)
    assert "layers.0.up.exp_avg_sq" in found


def test_two_states_swapped_at_one_end_are_named(parts):
    move = first_move(parts)
    wrong = [
        replace(
            part,
            receives=tuple(
                found
                for got in part.receives
                for found in ((replace(got, states=(0, 2)), replace(got, states=(2,))) if got == move else (got,))
            ),
        )
        for part in parts
    ]
    found = problems(wrong)
    assert re.search(rf"layers\.0\.up\.exp_avg \[.*\] on rank {move.dst}: \d+ of \d+ elements missing", found)
    assert re.search(rf"layers\.0\.up\.exp_avg_sq .* on rank {move.dst}: 0 of \d+ elements missing, \d+ written", found)
    assert "sent but not received" in found
    assert "received but not sent" in found


def test_a_dropped_move_is_named_and_counted(parts):
    move = first_move(parts)
    verdict = judge_all(CATALOGUE, OLD, NEW, change(parts, move))
    assert any(
        f"layers.0.up.exp_avg [0:6, 0:8] on rank {move.dst}" in text and "missing" in text for text in verdict.problems
    )
    elements = (move.box[0][1] - move.box[0][0]) * (move.box[1][1] - move.box[1][0])
    assert verdict.coverage["param"].missing == 4 * elements
    assert verdict.coverage["exp_avg_sq"].missing == 8 * elements
    assert verdict.coverage["step"].complete


def test_a_move_dropped_at_the_sender_only_is_named_and_never_waited_out(parts):
    move = first_move(parts)
    parts[move.src] = replace(parts[move.src], sends=tuple(one for one in parts[move.src].sends if one != move))
    found = problems(parts)
    assert re.search(rf"layers\.0\.up\.param \[.*\] on rank {move.dst} is received but not sent", found)
    assert f"waits for rank {move.src} for ever" in found


def test_a_duplicated_move_is_named_and_counted(parts):
    move = first_move(parts)
    verdict = judge_all(CATALOGUE, OLD, NEW, change(parts, move, move, move))
    assert verdict.coverage["param"].twice > 0
    assert verdict.coverage["param"].missing == 0
    assert any("layers.0.up.param" in text and "written twice" in text for text in verdict.problems)


def test_an_overlap_that_hides_a_hole_is_found(parts):
    # Two moves of equal total size, one row written twice and one never: volumes alone would agree.
    move = first_move(parts)
    (start, stop), *rest = move.box
    cut = (start + stop) // 2
    upper = replace(move, box=((start, cut), *rest))
    lower = replace(move, box=((cut - 1, stop - 1), *rest))
    verdict = judge_all(CATALOGUE, OLD, NEW, change(parts, move, upper, lower))
    row = 4 * (rest[0][1] - rest[0][0])
    assert (verdict.coverage["param"].twice, verdict.coverage["param"].missing) == (row, row)
    assert verdict.coverage["param"].expected == verdict.coverage["param"].written


def test_a_source_that_does_not_hold_the_box_is_named(parts):
    move = first_move(parts)
    liar = next(rank for rank in range(4) if rank not in {move.src, move.dst})
    wrong = change(parts, move, replace(move, src=liar))
    parts[liar] = replace(parts[liar], sends=(*wrong[liar].sends, replace(move, src=liar)))
    wrong[liar] = parts[liar]
    wrong[move.src] = replace(wrong[move.src], sends=tuple(s for s in wrong[move.src].sends if s.src == move.src))
    found = problems(wrong)
    assert re.search(
        rf"layers\.0\.up\.param \[.*\] on rank {liar} is not within the piece that the source holds", found
    )
    assert "missing" not in found


def test_a_piece_adopted_though_it_moved_is_named(parts):
    parts[0] = replace(parts[0], adopted=(*parts[0].adopted, (UP, 0)))
    assert re.search(r"layers\.0\.up\.param \[.*\] on rank 0 is adopted, but", problems(parts))


def test_a_granule_in_no_round_or_in_two_is_named(parts):
    rounds = parts[0].schedule.rounds
    lost = Schedule(rounds=(rounds[0][1:], *rounds[1:]), mode="keep")
    assert "embed.param is in 0 rounds" in problems([replace(part, schedule=lost) for part in parts])
    twice = Schedule(rounds=(*rounds, rounds[0][:1]), mode="keep")
    assert "embed.param is in 2 rounds" in problems([replace(part, schedule=twice) for part in parts])


def test_rounds_that_differ_between_ranks_are_a_deadlock_that_is_named(parts):
    first, second, *rest = parts[0].schedule.rounds
    other = Schedule(rounds=(second, first, *rest), mode="keep")
    parts[2] = replace(parts[2], schedule=other)
    found = problems(parts)
    assert "rounds must be equal on all ranks; ranks [2] have others" in found
    assert "for ever" in found


def test_a_ring_of_ranks_that_each_wait_for_the_next_is_found():
    # Three ranks, three granules; each waits in its first round for what its neighbour sends in the second.
    tensors = tuple(replace(CATALOGUE[0], name=f"t{i}", states=CATALOGUE[0].states[:1]) for i in range(3))
    here, there = (declared(tensors, layout(order, pp=3), 3) for order in ((0, 1, 2), (1, 2, 0)))
    names = [f"t{i}" for i in range(3)]
    old = Ownership(here.layout, {n: replace(here.placements[n], stages=(i,)) for i, n in enumerate(names)})
    new = Ownership(there.layout, {n: replace(there.placements[n], stages=(i,)) for i, n in enumerate(names)})
    even = Schedule(rounds=(((0, 0), (1, 0), (2, 0)),), mode="keep")
    ring = [rank_plan(tensors, old, new, rank, even) for rank in range(3)]
    assert judge_all(tensors, old, new, ring).ok
    for rank, part in enumerate(ring):
        late, early = part.sends[0].tensor, part.receives[0].tensor
        rest = 3 - late - early
        rounds = (((early, 0), (rest, 0)), ((late, 0),))
        ring[rank] = replace(part, schedule=Schedule(rounds=rounds, mode="keep"))
    found = judge_all(tensors, old, new, ring).problems
    assert sum("for ever" in text for text in found) == 3


def test_the_order_of_names_is_too_large_in_tight_under_pp():
    big = small(width=256, inner=1024, vocabulary=2048, layers=16)
    old, new = declared(big, layout(fsdp=4), 16), declared(big, layout(pp=4), 16)
    stored = storage(big, old, new)
    budget = default_budget(stored)
    good = tight_schedule(stored, budget)
    room = budget - STAGING_BYTES  # for pieces
    by_name = Schedule(rounds=tuple((granule,) for granule in stored.granules), mode="tight")
    assert judge_whole(big, old, new, whole_plan(big, old, new, good), budget_bytes=room).ok
    verdict = judge_whole(big, old, new, whole_plan(big, old, new, by_name), budget_bytes=room)
    assert re.search(r"rank 0 holds \d+ bytes in round \d+, \d+ above its limit", verdict.problems[0])
    part = rank_plan(big, old, new, 0, by_name)
    assert "above its limit" in judge_rank(big, old, new, part, budget_bytes=room).problems[0]


def test_tight_is_not_judged_without_a_budget(parts):
    tight = replace(parts[0].schedule, mode="tight")
    assert "none was given" in problems([replace(part, schedule=tight) for part in parts])


def test_a_move_of_what_does_not_exist_is_named(parts):
    ghost = Move(99, (0,), ((0, 1),), 1, 0)
    parts[0] = replace(parts[0], receives=(*parts[0].receives, ghost))
    found = judge_rank(CATALOGUE, OLD, NEW, parts[0]).problems
    assert "state 0 of tensor 99" in found[0]


def test_a_tensor_without_an_owner_is_named(parts):
    less = Ownership(OLD.layout, {name: p for name, p in OLD.placements.items() if name != "embed"})
    assert judge_all(CATALOGUE, less, NEW, parts).problems == ("embed has no owner in the old layout",)


def test_a_missing_part_is_named(parts):
    assert "ranks [0, 1, 2]" in judge_all(CATALOGUE, OLD, NEW, parts[:3]).problems[0]


def test_a_move_in_the_list_of_another_rank_is_named(parts):
    stray = parts[1].sends[0]
    parts[0] = replace(parts[0], sends=(*parts[0].sends, stray))
    assert "rank 0 has among its sends a move 1 ->" in problems(parts)


EXPERTS = small(width=8, inner=12, vocabulary=16, experts=4)
STACK = next(i for i, tensor in enumerate(EXPERTS) if tensor.name == "layers.0.experts.up")
ALL_HERE = declared(EXPERTS, layout(dp=4), LAYERS)
DEALT_OUT = declared(EXPERTS, layout(fsdp=4, ep=4), LAYERS)


def expert_parts():
    return [
        rank_plan(EXPERTS, ALL_HERE, DEALT_OUT, rank, keep_schedule(EXPERTS, 1000), adoptable=lambda _: False)
        for rank in range(4)
    ]


def renumbered(parts, number):
    """The parts with other expert numbers in every move of the first stack: ``number(dst, expert)``."""

    def changed(move):
        if move.tensor != STACK or not move.box:
            return (move,)
        first, end = move.box[0]
        shift = number(move.dst, first) - first
        return (replace(move, box=((first + shift, end + shift), *move.box[1:])),)

    return everywhere(parts, changed)


def test_the_plan_that_deals_out_experts_is_accepted():
    assert judge_all(EXPERTS, ALL_HERE, DEALT_OUT, expert_parts()).ok


@pytest.mark.parametrize(
    ("number", "ranks"),
    [
        (lambda dst, _expert: {1: 2, 2: 1}.get(dst, dst), (1, 2)),  # two experts swapped: every byte count is right
        (lambda _dst, _expert: 0, (1, 2, 3)),  # each rank counts its own from 0
    ],
    ids=["swapped", "local numbers"],
)
def test_experts_under_wrong_numbers_are_named(number, ranks):
    verdict = judge_all(EXPERTS, ALL_HERE, DEALT_OUT, renumbered(expert_parts(), number))
    found = "\n".join(verdict.problems)
    for rank in ranks:
        assert re.search(
            rf"experts\.up\.param \[.*\] on rank {rank} is not within the piece that the target needs", found
        )
        assert re.search(
            rf"experts\.up\.exp_avg \[{rank}:{rank + 1}, .*\] on rank {rank}: \d+ of \d+ elements miss", found
        )
    assert "layers.1" not in found


def test_layers_under_their_stages_local_numbers_are_named():
    # The second stage counts its layers from 0, as a strict load by local names does: layers 0 and 1 arrive twice.
    ups = tuple(replace(tensor, states=tensor.states[:1]) for tensor in CATALOGUE if tensor.name.endswith(".up"))
    old, new = declared(ups, OLD.layout, LAYERS), declared(ups, NEW.layout, LAYERS)
    schedule = keep_schedule(ups, 1000)

    def local(move):
        return (replace(move, tensor=move.tensor % 2) if move.dst in {2, 3} else move,)

    parts = [rank_plan(ups, old, new, rank, schedule) for rank in range(4)]
    assert judge_all(ups, old, new, parts).ok
    found = "\n".join(judge_all(ups, old, new, everywhere(parts, local)).problems)
    for rank, layer in itertools.product((2, 3), (0, 1)):
        assert re.search(
            rf"layers\.{layer}\.up\.param .* on rank {rank} is not within the piece that the target", found
        )
        assert re.search(rf"layers\.{layer + 2}\.up\.param \[.*\] on rank {rank}: \d+ of \d+ elements missing", found)


GATED = tuple(
    replace(tensor, name=tensor.name.replace(".up", name))
    for tensor in CATALOGUE
    for name in ((".gate", ".up") if tensor.name.endswith(".up") else ("",))
)
STAGED = layout(pp=2, fsdp=2)


def planned(catalogue, old, new):
    """Ownerships of two layouts and everybody's part of the plan between them; nothing is adopted."""
    before, after = (declared(catalogue, one, LAYERS) for one in (old, new))
    schedule = keep_schedule(catalogue, 1000)
    parts = [rank_plan(catalogue, before, after, rank, schedule, adoptable=lambda _: False) for rank in range(4)]
    return before, after, parts


def verdict(catalogue, old, new, parts):
    found = judge_all(catalogue, old, new, parts)
    return found, "\n".join(found.problems)


def number_of(catalogue, name):
    return next(i for i, tensor in enumerate(catalogue) if tensor.name == name)


def test_gate_in_the_place_of_up_is_named():
    """What reads one as the other while it carries out a right plan, the digests find (``dist/test_segments``)."""
    before, after, parts = planned(GATED, layout(fsdp=2, tp=2), STAGED)
    gate, up = (number_of(GATED, f"layers.2.{name}") for name in ("gate", "up"))
    assert judge_all(GATED, before, after, parts).ok

    def taken(move):
        return (replace(move, tensor=up) if (move.tensor, move.dst) == (gate, 3) else move,)

    _, found = verdict(GATED, before, after, everywhere(parts, taken))
    assert re.search(r"layers\.2\.gate\.param \[.*\] on rank 3: 48 of 48 elements missing", found)
    assert re.search(r"layers\.2\.up\.param \[.*\] on rank 3: 0 of 48 elements missing, 48 written twice", found)
    assert "layers.3" not in found


def test_a_copy_that_is_left_stale_is_named_though_another_is_whole():
    before, after, parts = planned(CATALOGUE, STAGED, layout(dp=2, fsdp=2))
    assert judge_all(CATALOGUE, before, after, parts).ok
    holders = [rank for rank in range(4) if after.box(CATALOGUE[UP], rank) == after.box(CATALOGUE[UP], 3)]

    found, said = verdict(
        CATALOGUE, before, after, everywhere(parts, lambda move: () if (move.tensor, move.dst) == (UP, 3) else (move,))
    )

    assert len(holders) == 2
    assert re.search(r"layers\.0\.up\.exp_avg \[.*\] on rank 3: 48 of 48 elements missing", said)
    assert f"on rank {holders[0]}:" not in said
    assert found.coverage["exp_avg"].missing > 0


def test_a_step_that_two_tensors_are_to_share_is_named():
    """As where experts get an optimizer of their own, whose one step is taken for all: the other's never arrives."""
    before, after, parts = planned(CATALOGUE, STAGED, layout(fsdp=4))
    down = number_of(CATALOGUE, "layers.0.down")
    step = len(CATALOGUE[UP].states) - 1
    assert CATALOGUE[UP].states[step].name == "step"

    def shared(move):
        if move.tensor != UP or step not in move.states or move.dst != 2:
            return (move,)
        rest = tuple(state for state in move.states if state != step)
        return (*((replace(move, states=rest),) if rest else ()), replace(move, tensor=down, states=(step,)))

    _, found = verdict(CATALOGUE, before, after, everywhere(parts, shared))
    assert re.search(r"layers\.0\.up\.step \[\] on rank 2: 1 of 1 elements missing", found)
    assert re.search(r"layers\.0\.down\.step \[\] on rank 2: 0 of 1 elements missing, 1 written twice", found)


def test_a_state_that_no_move_carries_is_named_on_every_rank():
    """As where a new optimizer has none yet and is asked what it needs: all else is there, and moments begin anew."""
    before, after, parts = planned(CATALOGUE, layout(fsdp=4), layout(tp=4))
    lost = [state.name for state in CATALOGUE[UP].states].index("exp_avg_sq")

    def without(move):
        rest = tuple(state for state in move.states if state != lost or move.tensor != UP)
        return (replace(move, states=rest),) if rest else ()

    found, said = verdict(CATALOGUE, before, after, everywhere(parts, without))
    for rank in range(4):
        assert re.search(rf"layers\.0\.up\.exp_avg_sq \[.*\] on rank {rank}: 24 of 24 elements missing", said)
    assert found.coverage["exp_avg_sq"].missing > 0
    assert found.coverage["param"].complete
    assert found.coverage["exp_avg"].complete
    assert "layers.1" not in said
