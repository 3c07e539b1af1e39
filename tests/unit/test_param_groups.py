"""Parameter groups are matched by what is in them."""

import pytest

from dynatrain.train.param_groups import ParamGroupError, match, merged

SAVED = {0: ["a.weight", "b.weight"], 1: [], 2: ["a.bias"], 3: []}


def refused(call, *given):
    with pytest.raises(ParamGroupError) as caught:
        call(*given)
    return str(caught.value)


def test_groups_go_by_their_parameters_and_empty_ones_by_their_order():
    assert match(SAVED, [[], ["a.bias"], [], ["b.weight", "a.weight"]]) == [1, 2, 3, 0]
    assert match(SAVED, list(SAVED.values())) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ([["a.weight", "b.weight", "a.bias"]], "it has 4 parameter groups, the optimizer here 1"),
        (
            [["a.weight", "a.bias"], [], ["b.weight"], []],
            "group 0 here has a.weight, of its group 0, and a.bias, of its",
        ),
        ([["a.weight"], ["b.weight"], ["a.bias"], []], "its parameter group 0 is 2 groups here"),
        ([["a.weight", "b.weight"], [], [], []], "its parameter group 2 has a.bias, which no group here has"),
        ([["a.weight", "b.weight", "c"], ["a.bias"], [], []], "none of its parameter groups has c"),
    ],
)
def test_groups_that_are_not_the_same_are_refused_by_name(here, said):
    assert said in refused(match, SAVED, here)


def test_the_groups_of_the_job_are_those_of_all_ranks():
    assert merged([[["a"], []], [["b", "a"], ["c"]]]) == [["a", "b"], ["c"]]
    assert "a is in group 0 on one rank and in group 1 on another" in refused(merged, [[["a"], []], [[], ["a"]]])
    assert "ranks have [1, 2] parameter groups" in refused(merged, [[["a"]], [["a"], []]])
