"""One flipped bit is found, and named: tensor, state, rank and place."""

import pytest
from tests.dist.trained import FLIPPED, DoneError, flip, sit_down, switcher, train
from tests.ranks import run

from dynatrain.train.agreement import SwitchFailedError


class Watched:
    """A job whose switches are asked for one after the other, each with a deed of one rank at one event."""

    def __init__(self, world, layout, mode, script):
        self.rank, self.mode, self.script = world.rank, mode, list(script)
        self.deed, self.ends, self.places = None, [], []
        self.sw = switcher(world, layout, hook=self.hook, mode=mode)
        original = self.sw._course._finish

        def finish(attempt, outcome, reason, told=None):
            self.ends.append((outcome, reason))
            original(attempt, outcome, reason, told)
            self.deed = None

        self.sw._course._finish = finish

    def hook(self, event, _number, _switch):
        if self.deed is not None and (event, self.rank) == self.deed[:2]:
            self.places.append(self.deed[2](self.sw, self.rank))

    def after_step(self, _result):
        if self.deed is None:
            if not self.script:
                raise DoneError
            layout, self.deed = self.script.pop(0)
            if self.deed[:2] == ("at once", self.rank):
                self.places.append(self.deed[2](self.sw, self.rank))
            self.sw.request(layout)

    def play(self):
        try:
            train(self.sw, self.after_step)
        except SwitchFailedError as failure:
            return "raised", str(failure), self.ends, self.places
        return "trained", "", self.ends, self.places


def in_new(state):
    return lambda sw, rank: flip(sw._course._attempt.new, state, rank)


def in_old(state):
    return lambda sw, rank: flip(sw.world, state, rank)


def watch(layout, mode, script):
    def work(world):
        sit_down(world)
        return Watched(world, layout, mode, script).play()

    results = run(4, work, seconds=40)
    assert all(isinstance(result, tuple) for result in results), results
    assert len({result[:2] for result in results}) == 1
    return results


def test_keep_names_tensor_state_rank_and_index_of_a_bit_that_flipped_in_a_destination_and_goes_on():
    script = [
        ("dp2.fsdp2", ("bound", 2, in_new("param"))),
        ("fsdp2.tp2", ("bound", 1, in_new("exp_avg_sq"))),
        ("dp2.fsdp2", ("never", 0, None)),
    ]
    results = watch("fsdp4", "keep", script)
    first, second = (f"first at index {results[rank][3][0]}" for rank in (2, 1))
    for how, _, ends, _ in results:
        assert (how, [outcome for outcome, _ in ends]) == ("trained", ["aborted", "aborted", "committed"])
        assert f"{FLIPPED} param on rank 2 in box" in ends[0][1]
        assert first in ends[0][1]
        assert f"{FLIPPED} exp_avg_sq on rank 1 in box" in ends[1][1]
        assert second in ends[1][1]


def test_tight_stops_the_run_and_names_tensor_state_and_rank_of_a_bit_that_flipped_in_a_destination():
    results = watch("fsdp4", "tight", [("dp2.fsdp2", ("bound", 2, in_new("exp_avg")))])
    for how, words, ends, _ in results:
        assert (how, [outcome for outcome, _ in ends]) == ("raised", ["failed"])
        assert words == ends[0][1]
        assert f"{FLIPPED} exp_avg on rank 2 in box" in words
        assert "the old state is gone" in words


@pytest.mark.parametrize("mode", ["keep", "tight"])
def test_copies_that_differ_before_a_switch_are_named_and_the_switch_is_refused(mode):
    results = watch("dp2.fsdp2", mode, [("fsdp4", ("at once", 3, in_old("param")))])
    index = results[3][3][0]
    for how, _, ends, _ in results:
        assert (how, [outcome for outcome, _ in ends]) == ("trained", ["aborted"])
        assert f"copies 0 and 1 of {FLIPPED} param differed before the switch" in ends[0][1]
        assert f"first at index {index}: ranks 1 and 3 held other bits" in ends[0][1]
