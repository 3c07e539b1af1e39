"""Where a switch to other members begins: newcomers are waited for only where its step was promised."""

import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from dynatrain.cluster.board import Board
from dynatrain.train.start import Start


class Ranks:
    """One old rank, whose newcomer is cold until it is said to be warm."""

    def __init__(self, deadline=60.0):
        self.board, self.warm = Board(HashStore(), 1), False
        way = SimpleNamespace(
            crossing=SimpleNamespace(generation=3),
            gate=self.board,
            cold=lambda: "" if self.warm else "newcomers [4] were",
        )
        attempt = SimpleNamespace(way=way, join=lambda _seconds: None, prepared=True, problem="", began=0.0)
        party = SimpleNamespace(rank=0, board=self.board, deadline=deadline, patience=1e9)
        self.attempt, self.party = attempt, party

    def start(self, at, edge=10):
        order = SimpleNamespace(turn=1, at=at, edge=edge)
        return Start(self.party, order, self.attempt, lambda: False)


def test_it_begins_at_the_step_that_was_promised_though_the_newcomer_is_late():
    ranks = Ranks()
    start = ranks.start(at=8)
    assert start.look(10, 6) is None  # the edge of the decision: nobody waits there
    later = threading.Timer(0.1, lambda: setattr(ranks, "warm", True))
    later.start()
    start.look(11, 7)
    later.join()

    assert start.look(12, 8).edge == 12


def test_nobody_waits_at_the_edge_of_the_decision_as_others_may_hear_of_it_an_edge_later():
    start = Ranks().start(at=8, edge=11)

    began = time.monotonic()
    assert start.look(11, 7) is None
    assert time.monotonic() - began < 30


def test_without_a_promise_nobody_waits_for_a_newcomer():
    ranks = Ranks()
    start = ranks.start(at=-1)
    assert [start.look(edge, edge - 4) for edge in (10, 11, 12)] == [None] * 3
    ranks.warm = True
    start.look(13, 9)

    assert start.look(14, 10).edge == 14


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "late"])
def test_a_newcomer_that_is_lost_or_later_than_a_phase_may_take_is_waited_for_no_longer(lost):
    ranks = Ranks(deadline=60.0 if lost else 0.05)
    start = ranks.start(at=8)
    start.look(10, 6)
    if lost:
        ranks.board.give_up(3, "newcomer 4: ended")

    go = start.look(11, 7)

    assert (go and go.edge) == (-1 if lost else None)
