"""A move that fails in any round, and the way back, on many ranks in one process."""

import pytest
from tests.sim.test_rounds import JOB, _small_bundles, built  # noqa: F401 - a fixture among them
from tests.stamped import Ballot, Rank, everywhere, local, owns, plans, schedule

from dynatrain.execute.rounds import backward
from dynatrain.space.ownership import num_holders


def fail(old, new, rounds, failing, event):
    """Ranks in ``tight``, one of which raised at ``event`` of round ``failing``."""
    size = num_holders(old, new)
    agree, lines, victim = Ballot(size), local(size), failing % size

    def hook(seen, number):
        if (seen, number) == (event, failing):
            raise InterruptedError

    ranks = [Rank(JOB, old, new, p, lines[p.rank], agree) for p in plans(JOB, old, new, size, rounds)]
    ranks[victim].executor._hook = hook
    results = everywhere(ranks, lambda rank: ranks[rank].executor.run(20))
    assert isinstance(results[victim], InterruptedError)
    last = (event, failing) == ("agreed", len(rounds.rounds) - 1)
    assert last or all(result is not None for result in results)
    return ranks


def go_back(ranks, old, new, rounds):
    """Carry everything back on new transports."""
    agreed = max(rank.executor.journal.agreed for rank in ranks)
    size = len(ranks)
    back, lines, agree = built(JOB, new, old, size, backward(rounds, agreed)), local(size), Ballot(size)
    for rank in ranks:
        rank.agree = agree
        rank.executor._hook = lambda _event, _round: None
    ways = [
        rank.executor.way_back(plan=plan, transport=line, agreed=agreed, agree=agree)
        for rank, plan, line in zip(ranks, back, lines, strict=True)
    ]
    assert everywhere(ranks, lambda rank: ways[rank].run(20)) == [None] * size
    return agreed


@pytest.mark.parametrize("event", ["round_start", "posted", "received", "agreed"])
@pytest.mark.parametrize(
    ("before", "after", "members"),
    [
        ("fsdp4", "pp2.tp2", None),
        ("pp4", "dp2.fsdp2", None),
        ("fsdp3", "tp4", (0, 4, 2, 3)),
    ],
)
def test_tight_fails_in_any_round_and_the_way_back_gives_the_old_bits(before, after, members, event):
    old, new = owns(JOB, before), owns(JOB, after, members=members)
    rounds = schedule(JOB, "tight", per_round=12)
    for failing in range(len(rounds.rounds)):
        ranks = fail(old, new, rounds, failing, event)
        for rank in ranks:
            freed = {g for g, piece in rank.old.items() if piece.storage.nbytes() < piece.nbytes}
            assert freed == {g for g in rank.executor.journal.handed_over if rank.old.get(g) and rank.old[g].nbytes} - {
                *rank.plan.adopted
            }
        assert go_back(ranks, old, new, rounds) == failing + (event == "agreed")
        for rank in ranks:
            assert rank.misplaced(old, rank.old) == []
            assert rank.pool.held == rank.old_bytes


@pytest.mark.parametrize("mode", ["keep", "tight"])
def test_a_failure_before_the_first_hand_over_leaves_old_pieces_and_no_others(mode):
    old, new = owns(JOB, "fsdp4"), owns(JOB, "pp2.tp2")
    ranks = fail(old, new, schedule(JOB, mode), 0, "received")
    for rank in ranks:
        rank.executor.abandon()
        assert rank.misplaced(old, rank.old) == []
        assert rank.pool.held == rank.old_bytes
