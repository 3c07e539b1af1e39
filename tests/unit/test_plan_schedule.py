"""Rounds, budgets, bytes: the numbers."""

import itertools
from collections import Counter

import numpy as np
import pytest
from tests.plans.cases import LAYERS, layout, small
from tests.shapes import small_shape

from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import parse_layout
from dynatrain.plan.build import whole_plan
from dynatrain.plan.errors import PlanError
from dynatrain.plan.hashes import plan_hash, sent_hash
from dynatrain.plan.plan import Move, RankPlan, Schedule
from dynatrain.plan.schedule import STAGING_BYTES, default_budget, keep_schedule, predicted_peak, tight_schedule
from dynatrain.plan.storage import alike, storage
from dynatrain.plan.summary import floor_seconds, summarise
from dynatrain.plan.table import table
from dynatrain.space.blocks import Experts
from dynatrain.space.decoder import catalogue
from dynatrain.space.ownership import declared

EVEN = small(width=16, inner=32, vocabulary=64)
BIG = small(width=256, inner=1024, vocabulary=2048, layers=16)


def between(before, after, catalogue=EVEN, layers=LAYERS):
    old, new = declared(catalogue, before, layers), declared(catalogue, after, layers)
    return old, new, storage(catalogue, old, new)


def test_rounds_of_keep_are_cut_by_bytes_of_whole_tensors_in_catalogue_order():
    rounds = keep_schedule(EVEN, 20_000).rounds
    assert [granule for granules in rounds for granule in granules] == [
        (tensor, state) for tensor, one in enumerate(EVEN) for state in range(len(one.states))
    ]
    sizes = [sum(EVEN[tensor].nbytes(EVEN[tensor].states[state]) for tensor, state in granules) for granules in rounds]
    assert len(rounds) == -(-sum(sizes) // 20_000)
    largest = max(tensor.nbytes(state) for tensor in EVEN for state in tensor.states)
    assert max(sizes) <= sum(sizes) / len(rounds) + largest


def test_each_round_of_keep_has_the_same_part_of_what_goes_between_any_two_stages():
    old, new, _ = between(layout(pp=2, fsdp=2), layout(pp=4), BIG, 16)
    rounds = keep_schedule(BIG, 1 << 25, (old, new)).rounds
    groups = {tensor.name: tuple(side.placements[tensor.name].stages for side in (old, new)) for tensor in BIG}
    total, most, through = Counter(), Counter(), Counter()
    for tensor in BIG:
        total[groups[tensor.name]] += sum(map(tensor.nbytes, tensor.states))
        most[groups[tensor.name]] = max(most[groups[tensor.name]], *map(tensor.nbytes, tensor.states))
    for number, granules in enumerate(rounds, 1):
        for tensor, state in granules:
            through[groups[BIG[tensor].name]] += BIG[tensor].nbytes(BIG[tensor].states[state])
        for group, nbytes in total.items():
            assert abs(through[group] - nbytes * number / len(rounds)) <= most[group]
    assert len(total) == 4
    assert through == total


def test_a_granule_above_the_round_size_is_a_round_of_its_own():
    assert all(len(granules) == 1 for granules in keep_schedule(EVEN, 1).rounds)


def test_tight_needs_few_rounds_and_holds_the_default_budget():
    _, _, stored = between(layout(fsdp=4), layout(pp=4), BIG, 16)
    budget = default_budget(stored)
    schedule = tight_schedule(stored, budget)
    limit = np.maximum(stored.old, stored.new) + budget - STAGING_BYTES
    assert (predicted_peak(stored, schedule) <= limit).all()
    assert len(schedule.rounds) < len(stored.granules) // 2


@pytest.mark.parametrize("tied", [False, True])
def test_the_default_budget_suffices_between_any_two_of_the_usual_layouts(tied):
    model = small(width=128, inner=384, vocabulary=4096, tied=tied)
    usual = [
        layout(dp=4),
        layout(fsdp=4),
        layout(dp=2, fsdp=2),
        layout(tp=4),
        layout(fsdp=2, tp=2),
        layout(dp=2, tp=2),
        layout(pp=4),
        layout(pp=2, fsdp=2),
        layout(pp=2, tp=2),
    ]
    for before, after in itertools.permutations(usual, 2):
        _, _, stored = between(before, after, model)
        tight_schedule(stored, default_budget(stored))


def test_many_small_shards_that_are_only_taken_need_more_than_two_of_the_largest():
    """Factored moments and experts, from stages to experts: what a random walk met."""
    experts = Experts(
        num_experts=14,
        num_experts_per_tok=1,
        moe_intermediate_size=14,
        gate="sigmoid",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        router_aux_loss_coef=0.0,
    )
    shape = small_shape(
        hidden_size=28,
        intermediate_size=14,
        num_hidden_layers=7,
        num_attention_heads=14,
        num_key_value_heads=7,
        head_dim=2,
        vocab_size=17,
        tie_word_embeddings=True,
        qk_norm=True,
        experts=experts,
    )
    tensors = catalogue(shape, "float64", optimizer="adafactor")
    stages, spread = (resolve(parse_layout(text), 7) for text in ("pp7", "tp7-sp.ep7.order_5_0_1_2_6_3_4"))
    stored = between(stages, spread, tensors, 7)[-1]
    two = 2 * int(stored.joined().taken.max()) + STAGING_BYTES

    with pytest.raises(PlanError, match="no order of hand-overs"):
        tight_schedule(stored, two)
    assert two < default_budget(stored) < 10 * (two - STAGING_BYTES) + STAGING_BYTES
    peak = predicted_peak(stored, tight_schedule(stored, default_budget(stored)))
    assert (peak <= np.maximum(stored.old, stored.new) + default_budget(stored) - STAGING_BYTES).all()


def test_what_is_adopted_everywhere_costs_no_memory_and_goes_first():
    _, _, stored = between(layout(dp=4), layout(dp=2, pp=2))
    assert stored.taken.sum() == 0
    assert stored.freed.sum() > 0
    _, _, stored = between(layout(fsdp=4), layout(fsdp=4))
    assert len(tight_schedule(stored, default_budget(stored)).rounds) == 1
    assert (predicted_peak(stored, keep_schedule(EVEN, 1)) == stored.old).all()


def test_keep_holds_old_and_new_but_adopted_pieces_once():
    old, new, stored = between(layout(fsdp=4), layout(fsdp=2, tp=2))
    summary = summarise(EVEN, old, new, whole_plan(EVEN, old, new, keep_schedule(EVEN, 1)), stored)
    both = stored.old + stored.new - stored.total(stored.adopted)
    assert summary.peak == tuple(both.tolist())


def test_where_no_order_fits_the_refusal_names_a_budget_that_does():
    _, _, stored = between(layout(pp=2, fsdp=2), layout(fsdp=4), BIG, 16)
    largest = int(stored.taken.max())
    with pytest.raises(PlanError, match=rf"largest shard of one tensor of one state takes {largest} alone") as refusal:
        tight_schedule(stored, largest // 2 + STAGING_BYTES)
    enough = int(str(refusal.value).split("A budget of ")[1].split()[0])
    tight_schedule(stored, enough)


def test_equal_boxes_with_unequal_padding_are_not_alike():
    # The fifth of 5 rows is alone on rank 2 in both: over fsdp4 in storage for two rows, over fsdp5 for one.
    odd = small(width=5, inner=5, vocabulary=5)
    old = declared(odd, layout(fsdp=4), LAYERS)
    new = declared(odd, layout((0, 1, 3, 4, 2), fsdp=5), LAYERS)
    assert old.box(odd[0], 2) == new.box(odd[0], 2)
    assert not any(alike(odd, old, new)(index) for index in range(len(odd)))
    assert all(alike(odd, old, new, padded=lambda _tensor, _state: False)(index) for index in range(len(odd)))
    assert all(alike(odd, old, old)(index) for index in range(len(odd)))


def test_the_hash_knows_states_boxes_and_peers_and_no_order():
    moves = [Move(1, (0, 1), ((0, 4), (2, 6)), 0, 1), Move(2, (3,), (), 1, 0)]
    one = plan_hash(EVEN, table(moves))
    assert plan_hash(EVEN, table(reversed(moves))) == one
    assert plan_hash(EVEN, table(moves[:1])) + plan_hash(EVEN, table(moves[1:])) in {one, one + 2**64}
    split = [Move(1, (state,), ((0, 4), (2, 6)), 0, 1) for state in (1, 0)]
    assert plan_hash(EVEN, table([*split, moves[1]])) == one
    others = [
        Move(1, (0, 2), ((0, 4), (2, 6)), 0, 1),
        Move(1, (0, 1), ((2, 6), (0, 4)), 0, 1),
        Move(1, (0, 1), ((0, 4), (2, 6)), 1, 0),
        Move(4, (0, 1), ((0, 4), (2, 6)), 0, 1),
    ]
    hashes = {plan_hash(EVEN, table([other, moves[1]])) for other in others}
    assert len(hashes) == 4
    assert one not in hashes


def test_a_rank_without_moves_adds_nothing_to_the_hash():
    idle = RankPlan(rank=0, sends=(), receives=(), relays=(), adopted=(), schedule=Schedule(rounds=(), mode="keep"))
    assert sent_hash(EVEN, idle) == 0


def test_the_floor_of_a_gather_is_what_a_rank_lacks_and_what_it_must_give():
    old, new, stored = between(layout(fsdp=4), layout(dp=4))
    summary = summarise(EVEN, old, new, whole_plan(EVEN, old, new, keep_schedule(EVEN, 1)), stored)
    cut = sum(t.nbytes(s) for t in EVEN for s in t.states if not s.scalar)
    assert summary.floor_link == cut * 3 // 4 == max(summary.bytes_in) == max(summary.bytes_out)
    assert summary.floor_machine == summary.moved + sum(summary.relaid)
    for name, at_rate_one in (
        ("link", summary.floor_link),
        ("wire", summary.floor_wire),
        ("copy", summary.floor_machine),
    ):
        fast = dict.fromkeys(("link", "wire", "copy"), 1e12) | {name: 1e6}
        rates = {f"{kind}_bytes_per_second": rate for kind, rate in fast.items()}
        assert floor_seconds(summary, **rates) == at_rate_one / 1e6


def test_the_floor_of_a_scatter_from_replicas_is_their_mean_share():
    old, new, stored = between(layout(dp=2), layout(dp=8))
    summary = summarise(EVEN, old, new, whole_plan(EVEN, old, new, keep_schedule(EVEN, 1)), stored)
    job = sum(t.nbytes(s) for t in EVEN for s in t.states)
    assert summary.moved == 6 * job
    assert summary.floor_link == 3 * job
    assert max(summary.bytes_out) <= 3 * job + 4096
