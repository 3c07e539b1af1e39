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
