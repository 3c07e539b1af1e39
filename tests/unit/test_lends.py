"""A loop that asks its agent for other members: one request of all ranks, and what is refused by name."""

import json
import re
from types import SimpleNamespace

import pytest

from dynatrain.observe.asked import Asked, NotDoneError
from dynatrain.observe.requests import Answer, Inbox
from dynatrain.observe.run import RunFolder
from dynatrain.train.lends import Lends


class Loop(Lends):
    """One rank of four, in step 5."""

    def __init__(self, folder, expected):
        worlds = folder and SimpleNamespace(folder=folder, attempt=1)
        self._party = SimpleNamespace(world_size=4, generation=2, worlds=worlds)
        self._turns = SimpleNamespace(expect=lambda *told: expected.append(told[:2]))
        self.step = 5


@pytest.fixture
def ranks(tmp_path):
    """Four, and what each expects."""
    (tmp_path / "requests").mkdir()
    expected = []
    return [Loop(RunFolder(tmp_path), expected) for _ in range(4)], Inbox(tmp_path / "requests"), expected


def test_all_ranks_ask_once_and_each_of_them_hears_the_answer(ranks):
    loops, inbox, expected = ranks
    asked = [loop.lend(count=2, layout="fsdp2", at=8) for loop in loops]
    (lend,) = inbox.new()
    back = [loop.reclaim(at=9) for loop in loops]
    (reclaim,) = inbox.new()

    assert (lend.verb, lend.arguments, lend.by) == ("lend", {"size": 2, "layout": "fsdp2", "at": 8}, "program")
    assert (reclaim.verb, reclaim.arguments) == ("reclaim", {"at": 9})
    assert expected == [(lend.id, 8)] * 4 + [(reclaim.id, 9)] * 4
    assert asked[0].answer() is None
    inbox.answer(lend.id, Answer(outcome="done", message="free"))
    inbox.answer(reclaim.id, Answer(outcome="aborted", message="no memory"))
    assert [one.wait().message for one in asked] == ["free"] * 4
    for one in back:
        with pytest.raises(NotDoneError, match="reclaim: aborted, no memory"):
            one.wait()


def test_named_ranks_leave_and_the_same_again_in_another_step_is_another_request(ranks):
    (loop, *_), inbox, _ = ranks
    loop.lend(ranks=[3, 1, 3], at=8)
    loop.step = 6
    loop.lend(ranks=[1], at=9)

    assert [request.arguments for request in inbox.new()] == [{"leave": [1, 3], "at": 8}, {"leave": [1], "at": 9}]


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"at": 8}, "ranks = [], count = 0: one of both, of ranks 0 to 3, of which one stays"),
        ({"count": 1, "ranks": [1], "at": 8}, "ranks = [1], count = 1: one of both"),
        ({"count": 4, "at": 8}, "count = 4"),
        ({"ranks": [4], "at": 8}, "ranks = [4]"),
        ({"ranks": [-1], "at": 8}, "ranks = [-1]"),
        ({"count": 1, "at": 7}, "at = 7: step 5 is under way; nearest: 8"),
    ],
)
def test_what_cannot_be_is_refused_before_anybody_is_asked(ranks, wish, said):
    (loop, *_), inbox, expected = ranks
    with pytest.raises(ValueError, match=re.escape(said)):
        loop.lend(**wish)
    assert (inbox.new(), expected) == ([], [])


def test_a_loop_without_an_agent_is_told_so():
    with pytest.raises(ValueError, match="reclaim: no agent of dynatrain starts and ends the ranks of this loop"):
        Loop(None, []).reclaim(at=8)


def test_no_answer_in_time_is_said_to_be_none(tmp_path):
    asked = Asked(tmp_path, "x", "lend")
    with pytest.raises(NotDoneError, match=re.escape("lend: failed, no answer within 0.01 s")):
        asked.wait(0.01)
    (tmp_path / "x.answer.json").write_text(json.dumps({"outcome": "unchanged", "message": "", "switch": None}))
    assert asked.wait(0.01).outcome == "unchanged"
