"""What is asked of a job, in the order in which it can be begun."""

import json
import re
import threading
import time

import pytest
from torch.distributed import HashStore

from dynatrain.cluster.board import Board
from dynatrain.train.wishes import Wishes


def taken(schedule, every, steps):
    """``{step: (verb, at)}`` of what is chosen where one order a step can be."""
    wishes = Wishes(Board(HashStore(), 1), schedule, "keep", every)
    found = {step: next(wishes.due(step), None) for step in range(steps)}
    return {step: (order.verb, order.at) for step, order in found.items() if order}


def test_saves_are_announced_before_their_step():
    assert taken({}, 5, 10) == {3: ("save", 5), 8: ("save", 10)}


def test_a_save_that_would_hold_up_a_scheduled_switch_comes_behind_it():
    assert taken({7: "dp2"}, 5, 8) == {5: ("switch", 7), 6: ("save", 5)}
    assert taken({8: "dp2"}, 5, 8) == {3: ("save", 5), 6: ("switch", 8)}


def test_a_scheduled_switch_inside_a_step_is_due_until_that_step_is_over():
    wishes = Wishes(Board(HashStore(), 1), {4: "dp2", 7: "tp2"}, "keep", inside={4: 3, 7: 0})
    wishes.begun(4)
    assert [(order.at, order.after) for order in (next(wishes.due(4)), next(wishes.due(5)))] == [(4, 3), (7, 0)]


def test_a_job_that_goes_on_at_the_step_of_a_switch_still_has_it_before_it():
    wishes = Wishes(Board(HashStore(), 1), {4: "dp2", 7: "tp2"}, "keep")
    wishes.begun(7)
    assert [order.at for order in wishes.due(9)] == [7]


def test_a_wish_for_a_later_step_holds_up_nothing_until_then():
    wishes = Wishes(Board(HashStore(), 1), {}, "keep", every=4)
    wishes.add("dp2", mode="", at=30, after=0, by="program")
    found = {step: [(order.verb, order.at) for order in wishes.due(step)] for step in range(31)}
    orders = [(step, *order) for step, taken in found.items() for order in taken]
    assert [order for order in orders if order[1] == "switch"] == [(28, "switch", 30)]
    assert [at for _, verb, at in orders if verb == "save" and at < 28] == list(range(4, 28, 4))


@pytest.mark.parametrize(
    ("schedule", "inside", "said"),
    [
        ({-3: "dp2"}, {}, "schedule has step -3"),
        ({0: "dp2"}, {}, "schedule has step 0: a job begins in its first layout; nearest: 1"),
        (
            {9: "dp2", 5: "tp2", 7: "dp2"},
            {},
            "schedule has step 7: 3 or more behind the one before, which is 5; nearest: 8",
        ),
        ({5: "dp2"}, {7: 2}, "inside has step 7, where no switch is scheduled; nearest with one: 5"),
        ({}, {7: 2}, "inside has step 7, where no switch is scheduled; there are no"),
        ({5: "dp2"}, {5: -1}, "inside has -1 micro-batches at step 5; nearest: 0"),
    ],
)
def test_a_schedule_that_cannot_be_kept_is_refused(schedule, inside, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Wishes(Board(HashStore(), 1), schedule, "keep", inside=inside)


def crossing(board, at, name="lent"):
    """As the agent puts up what the loop has asked it for."""
    told = {"layout": "fsdp2", "members": [0, 1], "generation": 1, "at": at}
    return board.publish(json.dumps({"id": name, "verb": "lend", "arguments": told}))


def test_other_members_from_a_step_on_are_asked_for_two_steps_before_it_and_hold_up_nothing_until_then():
    board = Board(HashStore(), 1)
    wishes = Wishes(board, {}, "keep", every=4)
    crossing(board, 11)

    found = {step: [(order.verb, order.at) for order in wishes.due(step)] for step in range(12)}

    assert {step: taken for step, taken in found.items() if taken} == {
        2: [("save", 4)],
        6: [("save", 8)],
        9: [("lend", 11)],
        10: [("save", 12)],
    }


def test_a_save_that_would_hold_up_what_is_still_with_the_agent_comes_behind_it():
    board = Board(HashStore(), 1)
    wishes, found = Wishes(board, {}, "keep", every=5), {}
    wishes.expect("lent", 7, lambda: False, 60.0)
    for step in range(8):
        if step == 5:
            crossing(board, 7)
        found[step] = next(wishes.due(step), None)

    assert {step: (order.verb, order.at) for step, order in found.items() if order} == {5: ("lend", 7), 6: ("save", 5)}


def test_what_is_still_with_the_agent_is_waited_for_at_the_last_edge_and_at_none_before():
    board = Board(HashStore(), 1)
    wishes = Wishes(board, {}, "keep")
    wishes.expect("lent", 9, lambda: False, 60.0)
    assert [*wishes.due(6)] == []
    later = threading.Timer(0.1, crossing, (board, 9))
    later.start()

    assert [(order.verb, order.at, order.members) for order in wishes.due(7)] == [("lend", 9, (0, 1))]

    later.join()
    began = time.monotonic()
    assert [*wishes.due(8)] == []
    assert time.monotonic() - began < 30


def test_a_stop_is_not_held_up_by_what_the_agent_will_not_begin_any_more():
    board = Board(HashStore(), 1)
    wishes = Wishes(board, {}, "keep")
    wishes.expect("lent", 9, lambda: False, 60.0)
    later = threading.Timer(0.1, board.publish, (json.dumps({"id": "s", "verb": "stop"}),))
    later.start()
    began = time.monotonic()

    assert [order.verb for order in wishes.due(7)] == ["stop"]

    later.join()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("answered", "patience"), [(True, 60.0), (False, 0.05)], ids=["answered", "never"])
def test_what_the_agent_refuses_or_never_puts_up_is_waited_for_no_longer(answered, patience):
    wishes = Wishes(Board(HashStore(), 1), {}, "keep")
    wishes.expect("lent", 9, lambda: answered, patience)
    began = time.monotonic()

    assert [*wishes.due(7)] == []
    assert [*wishes.due(8)] == []

    assert time.monotonic() - began < 30
