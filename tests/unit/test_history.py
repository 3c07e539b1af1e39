import pytest

from dynatrain.judge.history import check_history


def switch(number, step, old, new, outcome="committed"):
    return {
        "run_id": "r",
        "switch": number,
        "step": step,
        "from": old,
        "to": new,
        "outcome": outcome,
        "attempt": 1,
    }


SOUND = [
    switch(1, 9, "dp4", "fsdp4"),
    switch(2, 19, "fsdp4", "tp4", "aborted"),
    switch(3, 19, "fsdp4", "pp4"),
]


def test_switches_that_follow_each_other_are_sound():
    assert check_history(SOUND) == ()
    assert check_history(()) == ()


@pytest.mark.parametrize(
    ("place", "change", "said"),
    [
        (1, {"from": "dp4"}, "starts from dp4, but switch 1 left the run in fsdp4"),
        (2, {"from": "tp4"}, "starts from tp4, but switch 2 left the run in fsdp4"),
        (2, {"step": 8}, "is at step 8"),
        (2, {"switch": 2}, "follows switch 2"),
        (2, {"run_id": "other"}, "is of run other"),
        (2, {"attempt": 0}, "is of attempt 0, the one before it of attempt 1"),
    ],
)
def test_each_contradiction_between_two_switches_is_named(place, change, said):
    records = [dict(one) for one in SOUND]
    records[place] |= change
    assert said in check_history(records)[0]


def test_a_run_that_went_on_begins_where_it_was_saved():
    again = switch(4, 12, "dp2", "fsdp4") | {"attempt": 2}  # an earlier step, another layout
    assert check_history([*SOUND, again]) == ()
