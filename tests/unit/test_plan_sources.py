"""Who sends: replicas share the work, and what is near is preferred."""

from collections import Counter

import pytest
from tests.plans.cases import LAYERS, layout, small

from dynatrain.plan.build import rank_plan, whole_plan
from dynatrain.plan.errors import PlanError
from dynatrain.plan.plan import Schedule
from dynatrain.plan.summary import ledger
from dynatrain.space.ownership import Ownership, declared

NO_ROUNDS = Schedule(rounds=(), mode="keep")
EVEN = small(width=16, inner=32, vocabulary=64)


def plan_between(before, after, catalogue=EVEN, **how):
    old, new = declared(catalogue, before, LAYERS), declared(catalogue, after, LAYERS)
    return whole_plan(catalogue, old, new, NO_ROUNDS, **how)


def sent(before, after, catalogue=EVEN, **how):
    """Bytes sent by each rank of the old world."""
    total = Counter(dict.fromkeys(range(before.world_size), 0))
    for (src, _), size in ledger(catalogue, plan_between(before, after, catalogue, **how).moves).items():
        total[src] += size
    return total


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (layout(fsdp=4), layout(dp=4)),
        (layout(dp=2, fsdp=2), layout(fsdp=4)),
        (layout(dp=2, tp=2), layout(dp=4, tp=2)),
        (layout(dp=2), layout(fsdp=8)),
        (layout(dp=4), layout(dp=8)),
        (layout(dp=2, fsdp=2), layout(pp=2, dp=2, fsdp=2)),
        (layout(dp=3), layout(tp=6)),
    ],
)
def test_replicas_share_the_sending_evenly(before, after):
    # One box has one sender, so over few tensors the shares are not always equal to the byte.
    total = sent(before, after)
    assert max(total.values()) - min(total.values()) < 0.2 * max(total.values())


def test_copies_of_norms_over_tp_share_the_sending():
    norms = tuple(tensor for tensor in EVEN if "layers" in tensor.name and "norm" in tensor.name)
    total = sent(layout(tp=4), layout(dp=8), norms)
    assert len(set(total.values())) == 1


def test_both_holders_of_a_tied_embedding_send_it():
    tied = small(width=16, inner=32, vocabulary=64, tied=True)[:1]
    total = sent(layout(pp=2), layout(dp=4), tied)
    assert total[0] == total[1] > 0


def test_a_holder_on_the_node_of_the_target_is_preferred():
    moves = plan_between(layout(dp=8), layout(dp=16), ranks_per_node=4).moves
    assert {(src // 4, dst // 4) for src, dst in zip(moves.src.tolist(), moves.dst.tolist(), strict=True)} == {
        (0, 2),
        (1, 2),
        (0, 3),
        (1, 3),
    }
    moves = plan_between(layout(dp=4, fsdp=2), layout(fsdp=8), ranks_per_node=4).moves
    assert all(src // 4 == dst // 4 for src, dst in zip(moves.src.tolist(), moves.dst.tolist(), strict=True))


def test_the_same_box_in_the_same_storage_is_adopted_and_a_veto_relays_it():
    old = new = declared(EVEN, layout(fsdp=2), LAYERS)
    free = rank_plan(EVEN, old, new, 0, NO_ROUNDS)
    assert (free.sends, free.receives, free.relays) == ((), (), ())
    assert len(free.adopted) == sum(len(tensor.states) for tensor in EVEN)
    vetoed = rank_plan(EVEN, old, new, 0, NO_ROUNDS, adoptable=lambda tensor: tensor != 1)
    assert [(move.tensor, move.states) for move in vetoed.relays] == [(1, (0, 1, 2)), (1, (3,))]


def test_all_tensors_without_an_owner_are_named_at_once():
    own = declared(EVEN, layout(fsdp=2), LAYERS)
    less = Ownership(own.layout, {name: p for name, p in own.placements.items() if name not in {"embed", "norm"}})
    with pytest.raises(PlanError, match=r"2 tensor\(s\) have no owner in the old layout: embed, norm"):
        rank_plan(EVEN, less, own, 0, NO_ROUNDS)


def test_ranks_that_join_and_ranks_that_leave_take_part():
    grown = plan_between(layout(fsdp=2), layout(fsdp=4)).moves
    assert set(grown.dst.tolist()) == {0, 1, 2, 3}
    shrunk = plan_between(layout(fsdp=4), layout(fsdp=2)).moves
    assert set(shrunk.src.tolist()) == {0, 1, 2, 3}
    assert set(shrunk.dst.tolist()) == {0, 1}
