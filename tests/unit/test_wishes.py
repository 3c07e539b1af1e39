"""What is asked of a job, in the order in which it can be begun."""

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
    wishes = Wishes(Board(HashStore(), 1), {4: "dp2", 5: "tp2"}, "keep", inside={4: 3, 5: 0})
    wishes.begun(4)
    assert [(order.at, order.after) for order in (next(wishes.due(4)), next(wishes.due(4)))] == [(4, 3), (5, 0)]

    wishes = Wishes(Board(HashStore(), 1), {4: "dp2", 5: "tp2"}, "keep", inside={4: 3, 5: 0})
    wishes.begun(5)
    assert list(wishes.due(9)) == []
