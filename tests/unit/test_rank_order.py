"""The rank order of a new layout that leaves most bytes in place."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from tests.plans.cases import LAYERS, layout, small

from dynatrain.app.commands import plan as command
from dynatrain.layout.text import parse_layout, print_layout
from dynatrain.plan.build import whole_plan
from dynatrain.plan.order import chosen_order
from dynatrain.plan.schedule import keep_schedule
from dynatrain.plan.storage import storage
from dynatrain.plan.summary import summarise
from dynatrain.space.decoder import catalogue
from dynatrain.space.ownership import declared
from dynatrain.space.presets import resolve_model

DENSE = small(width=16, inner=32, vocabulary=64)
EXPERTS = small(width=16, inner=32, vocabulary=64, experts=8)


def moved(tensors, before, after):
    old, new = (declared(tensors, one, LAYERS) for one in (before, after))
    plan = whole_plan(tensors, old, new, keep_schedule(tensors, 1 << 30))
    return summarise(tensors, old, new, plan, storage(tensors, old, new)).moved


def chosen(tensors, before, after, **how):
    return chosen_order(tensors, *(declared(tensors, one, LAYERS) for one in (before, after)), **how)


CASES = {
    "a replica more": (DENSE, "fsdp4.tp2", "dp2.fsdp2.tp2", "fsdp2.dp2.tp2"),
    "a stage more": (DENSE, "fsdp4.tp2", "pp2.fsdp2.tp2", "fsdp2.pp2.tp2"),
    "nothing to gain": (DENSE, "pp2.fsdp2", "pp2.fsdp2", "pp2.fsdp2"),
    "fewer cuts of a column": (DENSE, "fsdp2.tp4", "fsdp4.tp2", "fsdp4.tp2.order_0_2_4_6_1_3_5_7"),
    "experts dealt out anew": (EXPERTS, "fsdp8.ep2", "fsdp8.ep4", "fsdp8.ep4.order_0_4_1_5_2_6_3_7"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_order_is_the_one_expected(case):
    tensors, before, after, expected = CASES[case]
    before, after = parse_layout(before), parse_layout(after)
    assert print_layout(chosen(tensors, before, after)) == expected


@pytest.mark.parametrize("case", CASES)
def test_no_order_of_whole_axes_moves_less(case):
    tensors, before, after, _ = CASES[case]
    before, after = parse_layout(before), parse_layout(after)
    found = moved(tensors, before, chosen(tensors, before, after))
    orders = [replace(after, axes=axes) for axes in itertools.permutations(after.axes)]
    assert found <= min(moved(tensors, before, one) for one in orders)


def test_a_factor_may_go_to_another_place_where_no_exchange_of_two_gains():
    shape = resolve_model("qwen3-235b-a22b")
    tensors, layers = catalogue(shape), shape.num_hidden_layers
    old, new = (declared(tensors, parse_layout(text), layers) for text in ("fsdp128.ep8", "fsdp128.ep16"))
    assert chosen_order(tensors, old, new).order[:6] == (0, 64, 1, 65, 2, 66)


def test_no_order_of_four_ranks_moves_less():
    for before, after in itertools.permutations([layout(fsdp=2, tp=2), layout(pp=2, tp=2), layout(dp=2, fsdp=2)], 2):
        orders = [replace(after, order=order) for order in itertools.permutations(range(4))]
        least = min(moved(DENSE, before, one) for one in orders)
        assert moved(DENSE, before, chosen(DENSE, before, after)) == least


@pytest.mark.parametrize("text", ["dp2.fsdp2.tp2.order_0_2_1_3_4_5_6_7", "tp2.fsdp4", "dp2.tp2.fsdp2"])
def test_an_order_that_the_text_says_stays(text):
    assert print_layout(chosen(DENSE, layout(fsdp=4, tp=2), parse_layout(text))) == text


@pytest.mark.parametrize("before", ["fsdp8", "tp8", "pp4.tp2", "fsdp2.tp4"])
@pytest.mark.parametrize("after", ["fsdp4.tp2", "pp2.fsdp2.tp2", "dp2.cp2.tp2"])
def test_groups_of_tp_and_cp_lie_on_no_more_nodes_than_as_written(before, after):
    before, after = parse_layout(before), parse_layout(after)
    found = chosen(DENSE, before, after, ranks_per_node=4)
    for axis in ("tp", "cp"):
        stride, ways = found.digit(axis)
        written, now = (
            max(
                len({one.rank_of(base + i * stride) // 4 for i in range(ways)})
                for base in range(8)
                if base // stride % ways == 0
            )
            for one in (after, found)
        )
        assert now <= written


def test_worlds_of_other_sizes_have_an_order_too():
    before, after = layout(fsdp=4, tp=2), layout(fsdp=2, tp=2)
    found = chosen(DENSE, before, after)
    assert sorted(found.ranks) == [0, 1, 2, 3]
    assert moved(DENSE, before, found) <= moved(DENSE, before, after)


def test_the_command_plans_in_the_chosen_order(capsys):
    words = ["fsdp4.tp2", "dp2.fsdp2.tp2", "--model", "tiny", "--json", "--judge"]
    found = []
    for more in ([], ["--choose-order"]):
        assert command.run([*words, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[1]["to"] == "fsdp2.dp2.tp2"
    assert found[1]["verdict"]["ok"]
    assert found[1]["bytes"]["moved"] < 0.7 * found[0]["bytes"]["moved"]
    assert np.isclose(sum(found[0]["bytes"].values()), sum(found[1]["bytes"].values()))
