"""Copies that differ before a switch, where the user wants the owner's values: taken, told, and equal from then on."""

import logging

import pytest
import torch
from tests.dist.foreign import Books, build_net, everywhere, switcher, until_ended

from dynatrain.train.torch_private import local_tensor

NAME = "blocks.1.0.weight"


class Counted(Books):
    """Books that also keep how many copies were mended."""

    def __init__(self):
        super().__init__()
        self.mended = []

    def ended(self, attempt, outcome, reason, *more):
        super().ended(attempt, outcome, reason, *more)
        self.mended.append(attempt.mended)


class Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.words = []

    def emit(self, record):
        self.words.append(record.getMessage())


def digits(sw):
    """Everything that this rank holds, by name and state, as text of its bits and box."""
    pieces = sw.world.pieces(sw._party.rank, torch.device("cpu"))
    catalogue = sw.world.catalogue
    return {
        (catalogue[t].name, catalogue[t].states[s].name): (p.box, p.tensor.tolist()) for (t, s), p in pieces.items()
    }


@pytest.mark.parametrize("mode", ["keep", "tight"])
def test_the_owners_values_are_taken_told_and_moved(mode):
    def work(world):
        failing = [True]

        def hook(event, _round, _switch):
            if event == "bound" and world.rank == 0 and failing:
                failing.clear()
                raise RuntimeError("planted")

        settings = {"mode": mode, "unequal_copies": "owner", "hook": hook, "recorder": (books := Counted())}
        sw = switcher(world, build_net, "dp2.fsdp2", data_parallel="free", **settings)
        logging.getLogger("dynatrain.train.copies").addHandler(said := Said())
        entry = sw.world.found[NAME].value
        with torch.no_grad():
            if world.rank == 3:  # of copy 1, beside rank 1
                local_tensor(entry)[2, 1] += 1
            if world.rank == 2:
                local_tensor(sw.optimizer.state[entry]["exp_avg"])[0, 0] = 5
                sw.optimizer.state[entry]["step"] += 7
        before = digits(sw)
        seen = []
        for target in ("fsdp4", "fsdp4", "dp2.fsdp2"):
            sw.request(target)
            until_ended(sw, books)
            seen.append(digits(sw))
        return before, seen, books.ends, books.mended, said.words

    found = everywhere(4, work)
    for rank, (before, (aborted, moved, back), ends, mended, words) in enumerate(found):
        owner = found[rank % 2][0]
        assert [outcome for _, outcome, _ in ends] == ["aborted", "committed", "committed"]
        assert "planted" in ends[0][2]
        assert mended == [3, 0, 0]  # the aborted switch has left them equal
        assert aborted == back == owner
        assert (before == owner) == (rank < 2)
        whole = {row for _, (_, of_rank, *_), *_ in found for row in map(str, of_rank[NAME, "param"][1])}
        assert whole == {row for at in (0, 1) for row in map(str, found[at][0][NAME, "param"][1])}
        assert moved[NAME, "step"] == ((), 0.0)
        if rank == 0:
            (said,) = words
            assert f"copies 0 and 1 of {NAME} param differed before the switch, first at index (7, 1)" in said
            assert "ranks 1 and 3 held other bits; and 2 more copies; copy 0 is taken" in said
        else:
            assert words == []


def test_another_policy_is_refused():
    def work(world):
        with pytest.raises(ValueError, match="no policy 'majority' for unequal copies; there are refuse, owner"):
            switcher(world, build_net, "dp1", unequal_copies="majority")
        return True

    assert everywhere(1, work) == [True]
