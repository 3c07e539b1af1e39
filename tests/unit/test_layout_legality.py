import time
from dataclasses import replace

import pytest
from tests.pace import allowed

from dynatrain.layout.form import LayoutError, form_problems
from dynatrain.layout.layout import Layout
from dynatrain.layout.legality import ModelLimits, check, nearest, problems
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import parse_layout, print_layout

TINY = ModelLimits(num_layers=4, num_heads=8, num_kv_heads=4, hidden_size=128, intermediate_size=384, vocab_size=4096)

# (text, world, micro-batches, sequence) -> the numbers that the one problem must name
ILLEGAL = {
    ("pp8", None, None, None): "pp8 has more stages than the model has layers, 4",
    ("pp3_1_1_1", None, None, None): "1_1_1 hold 3 layers but the model has 4",
    ("dp2.tp2", 8, None, None): "4 ranks (dp2 x tp2) but the world has 8",
    ("dp4", None, 3, None): "3 micro-batches over 4 data ranks leave 0 for some",
    ("pp2.dp2", None, 3, None): "each needs at least 2, one per pipeline stage: 4 in all",
    ("tp2-sp", None, None, 63): "tp2 does not divide the sequence length (-sp), 63",
    ("cp2.tp4-sp", None, None, 12): "tp4 does not divide the tokens of a cp rank (-sp), 6",
    ("cp2", None, None, 30): "cp2 cuts the sequence into 4 chunks, which do not divide 30; nearest: 28, 32",
    ("cp3", None, None, 4): "6 chunks, which do not divide 4; nearest: 6",
    ("cp4-ulysses.tp4", None, None, None): "cp4-ulysses does not divide the attention heads of a tp rank, 8 / 4 = 2",
    ("pp2v3", None, None, None): "pp2v3 has more stages than the model has layers, 4",
    ("pp2v2_1_1_1_2", None, None, None): "1_1_1_2 hold 5 layers but the model has 4",
    ("pp2-zb.fsdp2", None, None, None): "-zb under ZeRO-3 gives wrong gradients without an error",
    ("pp2v2-zbv.cp2", None, None, None): "-zbv under ZeRO-3 gives wrong gradients without an error",
    ("pp2v2", None, 5, None): "v2 takes the 5 micro-batches of a data rank in 2 rounds",
    ("pp2-zb.dp2", None, 13, None): "nearest: 12 or 16 micro-batches in all",
    ("fsdp4.ep2.etp2", None, None, None): "ep2.etp2 deals out experts, and the model has none",
}

LEGAL = (
    ("tp8", "more tp ranks than key/value heads: copies"),
    ("cp2-ulysses.tp4", "a head for each cp rank"),
    ("pp2-zb", "nothing is freed between the halves of a backward where nothing is sharded"),
    ("pp2v2-zbv.fsdp2-z2", "parameters stay gathered"),
    ("pp2v2-zbv.cp2-z1", "parameters stay gathered"),
    ("pp2v2", "a layer for each stage"),
)


@pytest.mark.parametrize("case", ILLEGAL)
def test_a_broken_rule_is_named_with_its_numbers(case):
    text, world, micro_batches, sequence = case
    found = problems(parse_layout(text), TINY, world_size=world, num_microbatches=micro_batches, sequence=sequence)

    assert len(found) == 1
    assert ILLEGAL[case] in found[0]


@pytest.mark.parametrize("text", ["pp2v2-zbv", "pp2", "pp3v2", "pp4-zb"])
def test_what_needs_no_rounds_or_has_one_takes_any_number_of_micro_batches(text):
    assert problems(parse_layout(text), replace(TINY, num_layers=6), num_microbatches=5) == ()


@pytest.mark.parametrize("text", ["pp2v2", "pp2v2.dp4", "pp8"])
def test_all_forwards_first_takes_any_number_of_micro_batches(text):
    limits = replace(TINY, num_layers=8)

    assert problems(parse_layout(text), limits, num_microbatches=5, schedule="gpipe") == ()
    assert problems(parse_layout(text), limits, num_microbatches=5)


def test_a_layout_that_names_its_schedule_is_held_to_that_one():
    found = problems(parse_layout("pp2-zb"), TINY, num_microbatches=5, schedule="gpipe")

    assert "in 2 rounds" in found[0]


@pytest.mark.parametrize(("text", "_why"), LEGAL)
def test_a_layout_just_within_the_rules_is_legal(text, _why):
    assert problems(parse_layout(text), TINY) == ()


EXPERTS = replace(TINY, num_experts=6, moe_intermediate_size=20)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("fsdp2.ep2", None),
        ("fsdp2.tp3.ep6", "tp3 does not divide"),
        ("fsdp4.ep4", "ep4 does not divide the experts, 6"),
        ("fsdp8.etp8", "etp8 does not divide the intermediate size of an expert, 20"),
        ("fsdp2.cp2.tp2.ep2.etp4", None),
    ],
)
def test_experts_are_dealt_out_whole_and_their_matrices_cut_evenly(text, named):
    found = problems(parse_layout(text), EXPERTS)

    assert any(named in problem for problem in found) if named else found == ()


def test_the_nearest_of_experts_that_do_not_divide_changes_ep_alone():
    near = nearest(parse_layout("fsdp12.ep4"), EXPERTS)

    assert [print_layout(layout) for layout in near] == ["fsdp12.ep3", "fsdp12.ep6", "fsdp12.ep2"]


@pytest.mark.parametrize("text", ["dp8", "fsdp2.tp2"])
def test_who_does_not_ask_for_cp_or_experts_is_not_sent_there(text):
    near = nearest(parse_layout(text), EXPERTS, num_microbatches=2, sequence=64, count=50)

    assert near
    assert not any(layout.size(axis) > 1 for layout in near for axis in ("cp", "ep", "etp"))


def test_all_broken_rules_are_listed_at_once():
    found = problems(parse_layout("tp3"), TINY, world_size=4)

    rules = ("attention heads, 8", "key/value heads, 4, nor", "hidden size, 128", "world has 4")
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
        (Layout(chunks=2), "v2 needs a pp axis"),
        (Layout(axes=(("pp", 2),), chunks=0), "v0: each pp rank has at least one stage"),
        (Layout(axes=(("pp", 2),), schedule="zz"), "zz is no schedule"),
        (Layout(schedule="zb"), "-zb needs a pp axis"),
        (Layout(axes=(("cp", 2),), cp_method="all"), "all is no way to attend over cp"),
        (Layout(cp_method="ring"), "-ring needs a cp axis"),
        (Layout(axes=(("fsdp", 2),), ep=0), "ep0: at least 1"),
        (Layout(axes=(("fsdp", 2), ("cp", 3)), ep=4), "4 does not divide the 6 ranks of fsdp x cp x tp"),
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


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("dp3.fsdp5.tp3", ["dp3.fsdp2.tp4", "dp3.fsdp2.tp2", "fsdp5.tp4"]),
        ("pp5.fsdp9", ["fsdp8", "pp2.fsdp4", "pp4.fsdp2"]),
        ("pp5.dp9.fsdp9.tp9", ["dp2.fsdp4.tp8", "dp4.fsdp2.tp8", "dp8.tp8"]),
    ],
)
def test_a_free_world_has_a_nearest_layout_however_many_rules_are_broken(text, near):
    assert [print_layout(layout) for layout in nearest(parse_layout(text), TINY, num_microbatches=8)] == near


def test_where_but_one_rank_will_do_it_is_the_nearest():
    near = nearest(parse_layout("pp5.dp3.fsdp5"), replace(TINY, num_layers=1), num_microbatches=1)

    assert near[0] == Layout()


LARGE = replace(TINY, num_layers=80, num_heads=64, num_kv_heads=8, hidden_size=8192, intermediate_size=28672)


@pytest.mark.timeout(20)  # enumerated to the end and then sorted, one of them takes minutes
@pytest.mark.parametrize("world_size", [None, 55440, 65536])
@pytest.mark.parametrize("text", ["pp9.dp2.fsdp35.cp2-ring.tp8-sp", "pp9.fsdp63.cp2.tp16", "pp81.dp3.fsdp7.cp3.tp3"])
def test_the_nearest_of_a_large_layout_are_found_at_once(text, world_size):
    given = {"world_size": world_size, "num_microbatches": 512, "sequence": 8192}
    near = nearest(parse_layout(text), LARGE, **given)

    assert len(near) == (0 if world_size == 55440 else 3)
    assert not any(problems(layout, LARGE, **given) for layout in near)


def test_a_split_that_does_not_divide_is_pinned_in_the_print():
    assert print_layout(resolve(parse_layout("pp4.dp2"), 6)) == "pp4_1_2_2_1.dp2"
    assert print_layout(resolve(parse_layout("pp4"), 8)) == "pp4"


def test_what_goes_without_saying_is_left_out_when_resolved():
    assert resolve(parse_layout("pp2_2_2"), 4) == resolve(parse_layout("pp2"), 4)
    assert resolve(Layout(axes=(("dp", 2),), order=(0, 1)), 4) == parse_layout("dp2")


@pytest.mark.clock
def test_what_is_near_a_layout_of_many_ranks_is_found_in_a_moment():
    began = time.process_time()
    for text in ("dp65536", "pp65536", "fsdp30030", "tp16384.dp4", "pp4v2-zbv.fsdp16.cp8-ring.tp2-sp"):
        for world in (None, parse_layout(text).world_size, 8):
            assert nearest(parse_layout(text), TINY, world_size=world, num_microbatches=64) or world not in {None, 8}

    assert time.process_time() - began < allowed(5)
