"""Agreement over a store: real stores, threads as ranks, no processes."""

import functools
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import HashStore, PrefixStore, Store

from dynatrain.cluster.board import Board, Decision
from dynatrain.cluster.heart import Beat, Heart, Pulse
from dynatrain.cluster.peers import Peers
from dynatrain.cluster.place import Place
from dynatrain.cluster.store import host_store, join_store


@pytest.fixture(params=["hash", "tcp"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Store]]:
    """Gives each participant a connection of its own, the same each time: torch asks DNS for every new one."""
    if request.param == "hash":
        store = HashStore()
        yield lambda _=0: PrefixStore("run", store)
    else:
        server = host_store()
        yield functools.cache(lambda _=0: PrefixStore("run", join_store("127.0.0.1", server.port)))


def together(world: int, connect: Callable[[int], Store], act: Callable[[Board, int], object]) -> list[object]:
    """What ``act`` gives on each rank, all at the same time."""
    found: list[object] = [None] * world
    boards = [Board(connect(rank), world) for rank in range(world)]

    def run(rank: int) -> None:
        found[rank] = act(boards[rank], rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_in_favour_is_a_yes_and_leaves_no_key(connect) -> None:
    before = connect().num_keys()
    for switch in range(20):
        found = together(3, connect, lambda board, rank, t=f"commit/{switch}": board.agree(t, rank, ok=True, timeout=5))
        assert found == [Decision(ok=True)] * 3
    assert connect().num_keys() == before


def test_one_no_is_a_no_everywhere_with_its_reason(connect) -> None:
    def act(board: Board, rank: int) -> Decision:
        time.sleep(random.random() * 0.01)
        return board.agree("check", rank, ok=rank != 1, detail="digest differs", timeout=5)

    before = connect().num_keys()
    assert together(4, connect, act) == [Decision(ok=False, reason="rank 1: digest differs")] * 4
    assert connect().num_keys() == before


def test_a_late_rank_is_named_and_learns_of_the_abort(connect) -> None:
    def act(board: Board, rank: int) -> Decision:
        if rank == 2:
            time.sleep(0.4)
        return board.agree("move", rank, ok=True, timeout=5 if rank == 2 else 0.1)

    found = together(3, connect, act)
    assert len(set(found)) == 1
    assert (found[0].ok, found[0].late, "late ranks [2]" in found[0].reason) == (False, (2,), True)
    assert connect().num_keys() == Board(connect(), 3).news()  # nothing is left


def test_deadlines_that_race_with_the_last_vote_give_one_outcome_never_a_mixed_one(connect) -> None:
    outcomes = set()
    trials, deadline = 24, 0.02
    for trial in range(trials):
        delay = 2 * deadline * trial / (trials - 1)  # well before the deadline, around it, well after it

        def act(board: Board, rank: int, trial: int = trial, delay: float = delay) -> Decision:
            if rank == 0:
                time.sleep(delay)
            return board.agree(f"t/{trial}", rank, ok=True, timeout=deadline)

        found = together(3, connect, act)
        assert len(set(found)) == 1, found
        outcomes.add(found[0].ok)
    assert outcomes == {True, False}, "the race was not exercised"


def test_a_no_whose_voter_died_before_deciding_still_counts(connect) -> None:
    board = Board(connect(), 2)
    board.vote("check", 0, [False, "digest differs"])
    assert board.agree("check", 1, ok=True, timeout=5) == Decision(ok=False, reason="rank 0: digest differs")


def test_exactly_one_proposal_wins(connect) -> None:
    found = together(8, connect, lambda board, rank: board.decide("x", {"by": rank}))
    assert len({answer["by"] for answer in found}) == 1


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
    board = Board(connect(), 2)
    began = time.monotonic()
    assert board.peek("nothing") is None
    assert board.votes("nothing") == {}
    assert board.missing("nothing") == (0, 1)
    assert time.monotonic() - began < 0.5


def test_a_stopped_heart_is_silent_and_a_beating_one_is_not(connect) -> None:
    now = [100.0]
    pulse = Pulse(Board(connect(0), 2), (0, 1), lambda: now[0])
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
    second.say("running")
    first.look()
    assert (first.failure(5), first.stopping()) == ("", (-1, 0))
    now[0] = 6.0
    assert "node 1 is silent for 6.0 s" in first.failure(5)
    second.say("stopping", signal=15)
    first.look()
    assert first.stopping() == (1, 15)
    second.say("failed", reason="rank 3 was killed")
    first.look()
    assert first.failure(5) == "node 1 failed: rank 3 was killed"
    second.say("done")
    first.look()
    now[0] = 100.0
    assert (first.failure(5), first.any_done()) == ("", True)
