import time

import pytest

from dynatrain.layout.form import LayoutError, form_problems
from dynatrain.layout.layout import Layout
from dynatrain.layout.legality import ModelLimits, check, nearest, problems
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import parse_layout, print_layout

TINY = ModelLimits(num_layers=4, num_heads=8, num_kv_heads=4, hidden_size=128, intermediate_size=384, vocab_size=4096)

# (text, world, micro-batches, sequence) -> the numbers that the one problem must name
ILLEGAL = {
    ("tp8", None, None, None): "tp8 does not divide the key/value heads, 4",
    ("pp8", None, None, None): "pp8 has more stages than the model has layers, 4",
    ("pp3_1_1_1", None, None, None): "1_1_1 hold 3 layers but the model has 4",
    ("dp2.tp2", 8, None, None): "4 ranks (dp2 x tp2) but the world has 8",
    ("dp4", None, 3, None): "3 micro-batches over 4 data ranks leave 0 for some",
    ("pp2.dp2", None, 3, None): "each needs at least 2, one per pipeline stage: 4 in all",
    ("tp2-sp", None, None, 63): "tp2 does not divide the sequence length (-sp), 63",
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_a_broken_rule_is_named_with_its_numbers(case):
    text, world, micro_batches, sequence = case
    found = problems(parse_layout(text), TINY, world_size=world, num_microbatches=micro_batches, sequence=sequence)

    assert len(found) == 1
    assert ILLEGAL[case] in found[0]


def test_all_broken_rules_are_listed_at_once():
    found = problems(parse_layout("tp3"), TINY, world_size=4)

    rules = ("attention heads, 8", "key/value heads, 4", "hidden size, 128", "world has 4")
    assert [sum(rule in problem for problem in found) for rule in rules] == [1, 1, 1, 1]


def test_a_vocabulary_that_tp_does_not_divide_is_legal():
    odd = ModelLimits(num_layers=4, num_heads=8, num_kv_heads=4, hidden_size=128, intermediate_size=384, vocab_size=257)

    assert problems(parse_layout("tp4"), odd, world_size=4) == ()


def test_a_sequence_that_tp_does_not_divide_is_legal_without_sp():
    assert problems(parse_layout("tp2"), TINY, sequence=63) == ()


def test_uneven_shares_of_micro_batches_are_legal_from_one_per_stage_up():
    assert problems(parse_layout("dp3"), TINY, num_microbatches=4) == ()


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (Layout(axes=(("xp", 2),)), "xp is not an axis"),
        (Layout(axes=(("dp", 2), ("dp", 2))), "dp appears 2 times"),
        (Layout(axes=(("dp", 1),)), "dp1"),
        (Layout(axes=(("dp", 0),)), "dp0"),
        (Layout(zero=1), "needs an fsdp axis"),
        (Layout(axes=(("fsdp", 2),), zero=4), "-z4"),
        (Layout(axes=(("fsdp", 2),), sp=True), "-sp needs a tp axis"),
        (Layout(stages=(4,)), "need a pp axis"),
        (Layout(axes=(("pp", 2),), stages=(4,)), "1 stages are pinned"),
        (Layout(axes=(("dp", 2),), order=(0, 2)), "not a permutation of 0..1"),
    ],
)
def test_a_layout_made_in_code_is_held_to_the_same_form(layout, named):
    assert any(named in problem for problem in form_problems(layout))
    assert any(named in problem for problem in problems(layout, TINY))


def test_a_refusal_names_every_problem_and_the_nearest_legal_layouts():
    with pytest.raises(LayoutError) as caught:
        check(parse_layout("tp3"), TINY, world_size=4, num_microbatches=8)

    assert caught.value.nearest == ("tp4", "dp2.tp2", "fsdp2.tp2")
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    assert "nearest legal: tp4, dp2.tp2, fsdp2.tp2" in str(caught.value)


def test_nearest_gives_up_only_the_option_at_fault():
    near = nearest(parse_layout("fsdp2-z2.tp2-sp"), TINY, world_size=4, sequence=63)

    assert print_layout(near[0]) == "fsdp2-z2.tp2"


def test_nearest_of_a_wrong_world_changes_one_axis_and_keeps_the_rest():
    near = nearest(parse_layout("fsdp2-z1.tp2-sp"), TINY, world_size=8)

    assert [print_layout(layout) for layout in near] == ["dp2.fsdp2-z1.tp2-sp", "fsdp2-z1.tp4-sp", "fsdp4-z1.tp2-sp"]


def test_nearest_of_a_legal_layout_is_itself():
    layout = parse_layout("tp2.dp2.order_3_1_2_0")

    assert nearest(layout, TINY, world_size=4)[0] == layout


def test_there_may_be_no_legal_layout_and_nearest_says_so_by_being_empty():
    assert nearest(parse_layout("dp7"), TINY, world_size=7, num_microbatches=4) == ()


def test_a_split_that_does_not_divide_is_pinned_in_the_print():
    assert print_layout(resolve(parse_layout("pp4.dp2"), 6)) == "pp4_1_2_2_1.dp2"
    assert print_layout(resolve(parse_layout("pp4"), 8)) == "pp4"


def test_what_goes_without_saying_is_left_out_when_resolved():
    assert resolve(parse_layout("pp2_2_2"), 4) == resolve(parse_layout("pp2"), 4)
    assert resolve(Layout(axes=(("dp", 2),), order=(0, 1)), 4) == parse_layout("dp2")


def test_what_is_near_a_layout_of_many_ranks_is_found_in_a_moment():
    began = time.process_time()
    for text in ("dp65536", "pp65536", "fsdp30030", "tp16384.dp4"):
        for world in (None, parse_layout(text).world_size, 8):
            assert nearest(parse_layout(text), TINY, world_size=world, num_microbatches=64) or world not in {None, 8}

    assert time.process_time() - began < 5
