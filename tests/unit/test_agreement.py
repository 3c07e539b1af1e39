"""A question that every rank answers: real stores, threads as ranks, no processes."""

import time

import pytest
from tests.boards import together

from dynatrain.cluster.board import Board
from dynatrain.train.agreement import (
    HEAR_SECONDS,
    Objection,
    StartRefusedError,
    SwitchAbortedError,
    exchange,
    on_every_rank,
)

pytestmark = pytest.mark.clock


def asked(board, topic, rank, *, payload=None, objection=None, timeout=5.0):
    """``(payloads in order, "", False)``, or ``(None, why, whether it was proven)`` where somebody objected."""
    try:
        told = exchange(board, topic, rank, payload=payload, objection=objection, timeout=timeout)
    except SwitchAbortedError as abort:
        return None, str(abort), abort.proven
    return told.in_order(), "", False


def test_all_hear_what_all_tell_and_no_key_is_left(connect):
    before = connect().num_keys()
    for switch in range(20):
        found = together(3, connect, lambda board, rank, t=f"s{switch}": asked(board, t, rank, payload={"rank": rank}))
        assert found == [([{"rank": 0}, {"rank": 1}, {"rank": 2}], "", False)] * 3
    assert connect().num_keys() == before


def test_one_objection_is_heard_everywhere_with_its_reason_and_leaves_no_key(connect):
    def act(board, rank):
        time.sleep(0.005 * ((rank + 2) % 4))
        return asked(
            board, "check", rank, objection=Objection(why="digest differs", proven=True) if rank == 1 else None
        )

    before = connect().num_keys()
    assert together(4, connect, act) == [(None, "rank 1: digest differs", True)] * 4
    assert connect().num_keys() == before


def test_a_late_rank_is_named_and_learns_of_the_abort(connect):
    def act(board, rank):
        if rank == 2:
            time.sleep(0.4)
        return asked(board, "move", rank, timeout=5 if rank == 2 else 0.1)

    before = connect().num_keys()
    assert together(3, connect, act) == [(None, "late ranks [2] after 0.1 s", False)] * 3
    assert connect().num_keys() == before


def test_deadlines_that_race_with_the_last_vote_give_one_outcome_never_a_mixed_one(connect):
    outcomes = set()
    trials, deadline = 24, 0.02
    for trial in range(trials):
        delay = 2 * deadline * trial / (trials - 1)  # well before the deadline, around it, well after it

        def act(board, rank, trial=trial, delay=delay):
            if rank == 0:
                time.sleep(delay)
            return asked(board, f"t/{trial}", rank, timeout=deadline)[1]

        found = together(3, connect, act)
        assert len(set(found)) == 1, found
        outcomes.add(found[0] == "")
    assert outcomes == {True, False}, "the race was not exercised"


def test_an_objection_whose_voter_died_before_deciding_still_counts(connect):
    board = Board(connect(), 2)
    board.vote("check", 0, {"against": ["digest differs", False, False], "payload": None})
    assert asked(board, "check", 1) == (None, "rank 0: digest differs", False)


def test_a_cause_counts_more_than_those_who_merely_saw_it(connect):
    def act(board, rank):
        time.sleep(0.02 * rank)  # the cause speaks last
        return asked(board, "moved", rank, objection=Objection(why=f"saw {rank}", echo=rank < 2))

    assert together(3, connect, act) == [(None, "rank 2: saw 2", False)] * 3


def test_where_all_merely_saw_it_the_one_that_says_nothing_is_the_cause(connect):
    def act(board, rank):
        if rank == 1:
            time.sleep(2 * HEAR_SECONDS)  # halted
            return asked(board, "moved", rank)
        return asked(board, "moved", rank, objection=Objection(why="connection lost", echo=True))

    (why,) = {text for _, text, _ in together(3, connect, act)}
    assert why == "late rank 1; connection lost"


def test_what_all_say_alike_is_said_once_without_names(connect):
    found = together(3, connect, lambda board, rank: asked(board, "q", rank, objection=Objection(why="no memory")))
    assert found == [(None, "no memory", False)] * 3


def started(board, rank, failing, words="odd"):
    """What came of a beginning in which the ``failing`` ranks refuse: the result, or the error's type and text."""

    def work():
        if rank in failing:
            raise LookupError(words)
        return rank * 10

    try:
        return on_every_rank(board, "start", rank, work, timeout=5.0)
    except (LookupError, StartRefusedError) as error:
        return type(error), str(error)


def test_what_one_rank_refuses_ends_the_start_on_all_with_one_text_and_what_all_refuse_keeps_its_type(connect):
    assert together(3, connect, lambda board, rank: started(board, rank, ())) == [0, 10, 20]
    said = (StartRefusedError, "rank 1: LookupError: odd")
    assert together(3, connect, lambda board, rank: started(board, rank, (1,))) == [said] * 3
    assert together(3, connect, lambda board, rank: started(board, rank, (0, 1, 2))) == [(LookupError, "odd")] * 3
    differing = together(2, connect, lambda board, rank: started(board, rank, (0, 1), f"odd {rank}"))
    assert differing == [(StartRefusedError, "rank 0: LookupError: odd 0; rank 1: LookupError: odd 1")] * 2
    assert together(1, connect, lambda board, rank: started(board, rank, (0,))) == [(LookupError, "odd")]
