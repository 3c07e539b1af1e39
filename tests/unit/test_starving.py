"""Orders that could begin, and that gradients keep from it at every edge."""

import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from dynatrain.cluster.board import Board
from dynatrain.train.attempt import Attempt
from dynatrain.train.start import Start

pytestmark = pytest.mark.clock


@pytest.fixture
def boards():
    store = HashStore()
    return [Board(store, 2) for _ in range(2)]


def start(board, rank, crossing=None):
    way = SimpleNamespace(crossing=crossing, gate=board)
    party = SimpleNamespace(board=board, rank=rank, patience=0.05)
    return Start(party, SimpleNamespace(turn=7), SimpleNamespace(way=way), lambda: False)


def test_it_is_given_up_on_both_ranks_at_the_edge_behind_the_one_at_which_patience_ended(boards):
    one, other = (start(board, rank) for rank, board in enumerate(boards))
    assert one.starves(3) is None
    time.sleep(0.06)
    assert one.starves(4) is None  # proposes edge 5
    assert other.starves(4) is None
    for rank in (one, other):
        go = rank.starves(5)
        assert go.edge == -1
        assert "gradients are pending at every edge" in go.reason
        assert "sw.step_parts" in go.reason
        rank.done()
    assert boards[0].starved(7) is None  # its keys are gone


def test_a_rank_that_never_waited_leaves_nothing_behind(boards):
    for rank, board in enumerate(boards):
        start(board, rank).done()
    assert boards[0].starved(7) is None


def test_newcomers_who_wait_at_the_edge_that_was_agreed_on_are_told(boards):
    crossing = SimpleNamespace(generation=2)
    old = start(boards[0], 0, crossing)
    old.starves(1)
    time.sleep(0.06)
    old.starves(2)
    assert old.starves(3).edge == -1

    newcomer = SimpleNamespace(
        party=SimpleNamespace(board=boards[1]), _channel=SimpleNamespace(decided=lambda _question: False)
    )
    assert "gradients are pending" in Attempt._starved(newcomer)
