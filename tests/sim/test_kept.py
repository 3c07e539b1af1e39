"""What a keeper has of its wards travels as its own pieces do."""

import pytest
from tests.stamped import Ballot, Rank, everywhere, job, local, owns, schedule, stamp

from dynatrain.execute import wire
from dynatrain.execute.pieces import Piece
from dynatrain.plan.build import rank_plan
from dynatrain.plan.keepers import keepers, kept_boxes
from dynatrain.plan.plan import Kept, Loss

JOB = job()


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("after", [("fsdp3", (0, 1, 2)), ("fsdp2", (2, 0)), ("tp2", (1, 2)), ("dp1", (0,))])
def test_a_lost_ranks_boxes_come_from_its_keeper(after, small, monkeypatch):
    if small:
        monkeypatch.setattr(wire, "BUNDLE_BYTES", 96)
        monkeypatch.setattr(wire, "PACK_BYTES", 32)
    text, members = after
    old, new = owns(JOB, "fsdp4"), owns(JOB, text, members=members)
    keeper = keepers(JOB, old, [0] * 4).keeper[3]
    kept = [Kept(holder=rank, owner=rank, step=8) for rank in range(4)] + [Kept(holder=keeper, owner=3, step=8)]
    loss = Loss(lost=frozenset({3}), step=8, kept=tuple(kept))
    rounds, agree, transports = schedule(JOB, "keep"), Ballot(3), local(3)
    parts = [rank_plan(JOB, old, new, rank, rounds, loss=loss) for rank in range(3)]
    ranks = [Rank(JOB, old, new, part, transports[part.rank], agree) for part in parts]
    for granule, box in kept_boxes(JOB, old, 3).items():
        ranks[keeper].executor._exchange.kept[granule] = [Piece(stamp(JOB, granule, box), box)]

    assert everywhere(ranks, lambda rank: ranks[rank].executor.run(20)) == [None] * 3
    assert [rank.misplaced(new, rank.executor.new) for rank in ranks] == [[]] * 3
