"""What a loss costs, in words and numbers, on worlds that can be counted by hand."""

from dataclasses import replace

import numpy as np
import pytest
from tests.losses import memory
from tests.plans.cases import LAYERS, layout, small

from dynatrain.data.order import batch_ids
from dynatrain.data.redone import Redone
from dynatrain.judge.judge import judge_rank
from dynatrain.plan.build import rank_plan
from dynatrain.plan.errors import PlanError
from dynatrain.plan.keepers import keepers, kept_boxes
from dynatrain.plan.loss import restore
from dynatrain.plan.plan import Kept
from dynatrain.plan.schedule import keep_schedule
from dynatrain.space.ownership import declared
from dynatrain.space.tensor import State

ONE = small(width=8, inner=12, vocabulary=16, states=(State("param", "float32"),))
SHARDED = declared(ONE, layout(fsdp=4), LAYERS)
COPIED = declared(ONE, layout(dp=2, fsdp=2), LAYERS)


def test_ranks_of_two_nodes_keep_for_each_other_and_the_bytes_are_those_of_their_shards():
    found = keepers(ONE, SHARDED, [0, 0, 1, 1])
    assert found.keeper == (2, 3, 0, 1)
    assert [found.bytes(rank) for rank in range(4)] == [
        found.own_bytes[rank] + found.sent_bytes[rank] for rank in range(4)
    ]
    assert sum(found.own_bytes) == sum(tensor.nbytes(state) for tensor in ONE for state in tensor.states) + 4 * 3 * (
        _scalars()
    )
    assert len(kept_boxes(ONE, SHARDED, 1)) == sum(len(tensor.states) - _scalars_of(tensor) for tensor in ONE)


def _scalars_of(tensor):
    return sum(state.scalar for state in tensor.states)


def _scalars():
    return sum(map(_scalars_of, ONE))


def test_what_every_box_has_copies_of_is_kept_by_nobody():
    found = keepers(ONE, COPIED, [0, 0, 1, 1])
    assert (found.keeper, found.sent_bytes) == ((None,) * 4, (0,) * 4)
    assert kept_boxes(ONE, COPIED, 0) == {}


def test_nodes_of_another_world_are_refused():
    with pytest.raises(PlanError, match="nodes of 3 ranks were given; the layout has 4"):
        keepers(ONE, SHARDED, [0, 0, 1])


def test_copies_lose_no_step():
    found = restore(ONE, COPIED, lost={1, 2}, kept=memory(4, 12, snapshots=(8,)), files=(6,))
    assert (found.loss.step, found.passed) == (12, ())
    held = keepers(ONE, COPIED, [0] * 4).own_bytes
    assert found.bytes == {"copies": held[1] + held[2] - 4 * _scalars(), "keepers": 0, "files": 0}  # both held those
    assert found.told(32)["redone"] == {"steps": 0, "samples": 0, "text": "no step is done again"}


def test_a_keeper_goes_back_to_its_snapshot_and_says_why_and_what_is_done_again():
    keeper = keepers(ONE, SHARDED, [0, 0, 1, 1]).keeper
    told = restore(ONE, SHARDED, lost={3}, kept=memory(4, 12, keeper, (8,)), files=(6,)).told(32)
    why = told.pop("why_no_newer")
    assert len(why) == 1
    assert why[0].startswith(
        "step 12: nobody has embed.param [12:16, 0:8]: rank 3, which held it, is lost; rank 1, its keeper, has it of "
        "steps [8] (and "
    )
    sent = keepers(ONE, SHARDED, [0, 0, 1, 1]).sent_bytes[3]
    assert told["bytes"] == {"copies": told["bytes"]["copies"], "keepers": sent, "files": 0}
    assert told["redone"]["text"] == ("steps 8 to 11 are done again: the 128 samples at places 256 to 383 of the order")


@pytest.mark.parametrize(
    ("torn", "files", "step", "why"),
    [
        ((1, 3), (6,), 6, "rank 1, its keeper, has it of step 8 only in part"),
        ((0, 0), (6,), 6, "rank 0, which held it, has it of step 8 only in part"),
        ((1, 3), (), None, "of no step is everything left"),
    ],
)
def test_a_snapshot_that_never_quite_arrived_counts_as_nothing(torn, files, step, why):
    kept = [one for one in memory(4, 12, (2, 3, 0, 1), (8,)) if one.live or (one.holder, one.owner) != torn]
    kept.append(Kept(holder=torn[0], owner=torn[1], step=8, complete=False))
    if torn == (0, 0):
        kept = [one for one in kept if (one.holder, one.owner) != (2, 0)]
    if step is None:
        with pytest.raises(PlanError, match=why):
            restore(ONE, SHARDED, lost={3}, kept=kept, files=files)
        return
    found = restore(ONE, SHARDED, lost={3}, kept=kept, files=files)
    assert (found.loss.step, found.loss.files) == (step, step)
    assert why in str(found.passed[1])


def test_contradictions_are_told_all_at_once():
    kept = [Kept(holder=0, owner=9, step=3), Kept(holder=1, owner=2, step=3, live=True)]
    with pytest.raises(PlanError) as refused:
        restore(ONE, SHARDED, lost={7}, kept=kept)
    assert [text in str(refused.value) for text in ("ranks [7] cannot", "pieces of rank 9", "rank 1's of 2")] == [
        True
    ] * 3


def test_the_samples_that_are_done_again_are_those_of_their_steps():
    again = Redone(first=3, end=5, global_sequences=4)
    assert again.ids(7, 100).tolist() == [*batch_ids(7, 3, 4, 100), *batch_ids(7, 4, 4, 100)]
    assert Redone(first=3, end=4, global_sequences=4).samples == 4
    assert Redone(first=3, end=3, global_sequences=4).ids(7, 100).dtype == np.int64
    assert str(Redone(first=3, end=4, global_sequences=4)) == (
        "step 3 is done again: the 4 samples at places 12 to 15 of the order"
    )


def test_a_keeper_that_is_asked_for_a_box_that_has_copies_is_found():
    new = declared(ONE, layout(dp=2, fsdp=2).over((0, 1, 4, 3)), LAYERS)
    kept = (*memory(4, 12), Kept(holder=1, owner=2, step=12))
    loss = restore(ONE, COPIED, lost={2}, kept=kept).loss
    part = rank_plan(ONE, COPIED, new, 4, keep_schedule(ONE, 1000), loss=loss)
    assert judge_rank(ONE, COPIED, new, part, loss=loss).problems == ()
    assert part.receives[0].src == 0

    first, *rest = part.receives
    planted = replace(part, receives=(replace(first, src=1), *rest))
    said = judge_rank(ONE, COPIED, new, planted, loss=loss).problems
    assert said == (
        "embed.param [0:8, 0:8] on rank 4 is not among what its source has kept (move from rank 1 to rank 4)",
    )
