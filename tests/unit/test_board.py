"""Agreement over a store: real stores, threads as ranks, no processes."""

import random
import threading
import time
from datetime import timedelta

import pytest
from tests.boards import together
from torch.distributed import HashStore

from dynatrain.cluster.board import Board
from dynatrain.cluster.heart import Beat, Heart, Pulse
from dynatrain.cluster.peers import Peers, Status
from dynatrain.cluster.place import Place

pytestmark = pytest.mark.clock


def test_exactly_one_proposal_wins(connect) -> None:
    found = together(8, connect, lambda board, rank: board.decide("x", {"by": rank}))
    assert len({answer["by"] for answer in found}) == 1


def test_ranks_whose_patience_ends_at_different_edges_give_up_at_the_same_next_edge(connect) -> None:
    """As above, where gradients are pending at every edge."""
    for switch in range(101, 113):
        step = threading.Barrier(3, timeout=5)

        def act(board: Board, rank: int, switch: int = switch, step: threading.Barrier = step) -> int:
            dice = random.Random(100 * switch + rank)
            patience = dice.randrange(1, 4)
            for edge in range(1, 10):
                step.wait()  # nobody ends a step before all have begun it
                time.sleep(dice.random() * 0.003)
                found = board.starved(switch)
                if found is None and edge >= patience:
                    board.starve(switch, edge, "pending")
                if found is not None and found[0] <= edge:
                    board.leave(f"starved/{switch}")
                    return found[0] if found[0] == edge else -edge
            return 0

        found = together(3, connect, act)

        assert len(set(found)) == 1
        assert found[0] > 1


def test_ranks_at_different_edges_all_begin_the_switch_at_the_same_next_edge(connect) -> None:
    """Threads as ranks, a barrier as the coupling of a training step; ranks become ready at random edges."""
    for switch in range(1, 13):
        step = threading.Barrier(3, timeout=5)

        def act(board: Board, rank: int, switch: int = switch, step: threading.Barrier = step) -> int:
            dice = random.Random(100 * switch + rank)
            ready_at = dice.randrange(1, 4)
            for edge in range(1, 10):
                step.wait()  # nobody ends a step before all have begun it
                time.sleep(dice.random() * 0.003)
                if edge == ready_at:
                    board.ready(switch, rank, edge)
                go = board.go_edge(switch) if edge >= ready_at else None
                if go is not None and go.edge <= edge:
                    board.done_with(switch)
                    return go.edge if go.edge == edge else -edge
            return 0

        found = together(3, connect, act)
        assert len(set(found)) == 1, found
        assert found[0] > 1
    assert connect().num_keys() == 0


def test_a_last_voter_that_is_halted_before_it_decides_is_the_late_one(connect) -> None:
    board = Board(connect(), 2)
    board.vote("q", 0, True)
    assert board.vote("q", 1, True)
    assert board.decision("q", 0.05)["late"] == [1]


def test_a_switch_that_is_not_ready_in_time_is_given_up_by_all_with_the_late_ranks(connect) -> None:
    board = Board(connect(), 3)
    board.ready(4, 0, 10)
    assert board.go_edge(4) is None
    go = board.overdue(4, waited=2.0)
    assert (go.edge, go.late) == (-1, (1, 2))
    board.ready(4, 1, 11)
    board.ready(4, 2, 11)  # too late: the last one does not overrule
    assert board.go_edge(4) == go
    assert board.give_up(4, "another reason") == go


def test_requests_are_read_in_order_and_taken_down_with_their_answer(connect) -> None:
    agent, rank = Board(connect(0), 1), Board(connect(1), 1)
    assert rank.news() == 0
    keys = connect().num_keys()
    for number in range(30):
        assert agent.publish(f"wish {number}") == number
        assert (rank.news(), rank.read(number)) == (number + 1, f"wish {number}")
        assert agent.take_answer(number) is None
        rank.answer(number, "yes")
        rank.answer(number, "no")  # the first stands
        assert agent.take_answer(number) == "yes"
        assert rank.read(number) is None
    assert connect().num_keys() == keys


def test_a_missing_key_is_told_at_once(connect) -> None:
    store = connect()
    store.set_timeout(timedelta(seconds=30))  # as long as its own ``get`` would wait
    board = Board(store, 2)
    began = time.monotonic()
    assert board.peek("nothing") is None
    assert board.votes("nothing") == {}
    assert board.missing("nothing") == (0, 1)
    assert time.monotonic() - began < 10


def test_a_stopped_heart_is_silent_and_a_beating_one_is_not(connect) -> None:
    now = [100.0]
    pulse = Pulse(Board(connect(0), 2), lambda: now[0])
    pulse.watch((0, 1))
    with Heart(Board(connect(1), 2), 0) as heart:
        heart.at(step=40, phase="move", switch=3)
        pulse.look()
        assert str(pulse.last(0)) == "phase move of switch 3, step 40"
        assert pulse.last(1) == Beat()
        now[0] += 10
        time.sleep(0.7)  # one beat
        pulse.look()
        assert pulse.silent(5) == (1,)
    pulse.look()
    now[0] += 10
    pulse.look()
    assert pulse.silent(5) == (0, 1)


def test_agents_hear_of_each_others_stop_failure_and_silence() -> None:
    store = HashStore()
    now = [0.0]
    first, second = (
        Peers(Board(store, 2), Place(node=n, nodes=2, host="h", port=1, nonce="s"), lambda: now[0]) for n in range(2)
    )
    second.say(Status())
    first.look()
    assert (first.failure(5), first.stopping()) == ("", (-1, 0))
    now[0] = 6.0
    assert "node 1 is silent for 6.0 s" in first.failure(5)
    second.say(Status(state="stopping", signal=15))
    first.look()
    assert first.stopping() == (1, 15)
    second.say(Status(state="failed", reason="rank 3 was killed"))
    first.look()
    assert first.failure(5) == "node 1 failed: rank 3 was killed"
    second.say(Status(state="done", code=75, living=(4,)))
    first.look()
    now[0] = 100.0
    assert (first.failure(5), first.any_done(), first.code) == ("", True, 75)
    first.say(Status())
    assert {node: (said.state, said.living) for node, said in first.everyone.items()} == {
        0: ("running", ()),
        1: ("done", (4,)),
    }


def test_a_lasting_decision_outlives_its_topic_and_a_lost_voter_is_not_waited_for():
    store, why = HashStore(), []
    boards = [Board(store, 2, broken=lambda: "".join(why), lasting=("kept",)) for _ in range(2)]
    for topic in ("kept", "gone"):
        for rank, board in enumerate(boards):
            if board.vote(topic, rank, None):
                board.decide(topic, {"yes": 1})
        for board in boards:
            board.leave(topic)
    assert (boards[0].decided("kept"), boards[0].decided("gone")) == ({"yes": 1}, None)
    assert store.num_keys() == 1

    boards[0].vote("open", 0, None)
    why.append("rank 1 was killed")
    assert boards[0].decision("open", 600.0) == {"abort": "rank 1 was killed", "late": [1]}
