"""Who is lost, and which world follows."""

import pytest

from dynatrain.cluster.context import Report
from dynatrain.cluster.lost import aftermath, is_lost
from dynatrain.cluster.membership import MembershipError
from dynatrain.cluster.summons import Summons


@pytest.mark.parametrize(
    ("end", "lost"),
    [
        ({"signal": 9}, True),
        ({"code": 7}, True),
        ({"code": 1, "words": "ValueError: planted"}, False),
        ({"code": 0}, False),
        ({"code": 75}, False),
    ],
)
def test_a_rank_is_lost_that_ended_badly_without_a_word(end, lost) -> None:
    assert is_lost(Report(kind="ended", member=1, **end)) is lost


def even(size: int) -> str:
    if size % 2:
        raise ValueError(f"{size} ranks: nearest: {size - 1}")
    return f"dp{size}"


def test_as_many_survivors_go_on_as_have_a_layout() -> None:
    found = aftermath((0, 1, 5, 6), {5: "rank 2 was killed"}, generation=4, layout=even)
    assert (found.new, found.layout, found.stage) == ((0, 1), "dp2", "asked")
    assert (found.survivors, found.lost, found.leavers, found.why) == ((0, 1, 6), (5,), (5, 6), "rank 2 was killed")
    assert Summons.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        ({0: "a", 1: "b"}, "a; b; and the run cannot go on: nobody is left"),
        ({1: "b"}, "b; and the run cannot go on: with 1 of 1 survivors: 1 ranks: nearest: 0"),
    ],
)
def test_where_nobody_can_go_on_it_says_who_is_lost_and_why_not(lost, why) -> None:
    with pytest.raises(MembershipError) as refused:
        aftermath((0, 1), lost, generation=1, layout=even)
    assert str(refused.value) == why
