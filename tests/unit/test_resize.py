"""Which layout a world of another size gets."""

import itertools
import math

import pytest

from dynatrain.layout.form import LayoutError
from dynatrain.layout.legality import ModelLimits, problems
from dynatrain.layout.resize import resized
from dynatrain.layout.text import parse_layout, print_layout

TINY = ModelLimits(num_layers=4, num_heads=8, num_kv_heads=4, hidden_size=128, intermediate_size=384, vocab_size=4096)

# (present layout, size) -> the next one
NEXT = {
    ("fsdp4", 6): "fsdp6",
    ("fsdp4", 1): "dp1",
    ("dp1", 3): "fsdp3",
    ("fsdp4-z2", 8): "fsdp8-z2",
    ("dp2.fsdp2", 6): "dp2.fsdp3",
    ("dp2.fsdp2", 2): "dp2",
    ("dp2.fsdp3", 3): "fsdp3",
    ("dp2.fsdp2", 5): "fsdp5",
    ("dp4", 8): "dp8",
    ("dp4", 3): "dp3",
    ("tp2-sp", 6): "fsdp3.tp2-sp",
    ("fsdp2.tp2", 8): "fsdp4.tp2",
    ("fsdp2.tp2", 2): "tp2",
    ("fsdp2.tp2", 7): "fsdp7",
    ("pp2.fsdp2.tp2", 4): "pp2.tp2",
    ("pp2_1_3.fsdp2", 6): "pp2_1_3.fsdp3",
    ("pp2.tp2", 6): "pp3.tp2",
    ("pp4", 3): "pp3",
    ("cp2-ring.fsdp2", 8): "cp2-ring.fsdp4",
    ("tp2.fsdp2", 6): "tp2.fsdp3",
}


@pytest.mark.parametrize(("text", "size"), NEXT)
def test_fsdp_takes_the_change_then_dp_and_the_rest_stays_while_it_can(text, size):
    found = resized(parse_layout(text), TINY, world_size=size, num_microbatches=8, sequence=64)

    assert print_layout(found) == NEXT[text, size]


def legal_sizes(**given):
    """Sizes up to 8 that have a legal layout of the plain axes, by trying all."""
    found = set()
    for sizes in itertools.product(range(1, 9), repeat=4):
        if math.prod(sizes) > 8:
            continue
        named = [f"{axis}{size}" for axis, size in zip(("pp", "dp", "fsdp", "tp"), sizes, strict=True) if size > 1]
        layout = parse_layout(".".join(named) or "dp1")
        if not problems(layout, TINY, **given):
            found.add(layout.world_size)
    return found


@pytest.mark.parametrize("text", ["dp4", "fsdp4", "fsdp2.tp2-sp", "pp2.fsdp2", "pp4", "tp4-sp", "pp2v2-zbv.fsdp2-z2"])
@pytest.mark.parametrize("batch", [4, 8])
def test_every_size_is_reached_from_every_layout_wherever_any_is_legal(text, batch):
    given = {"num_microbatches": batch, "sequence": 128}
    reachable = legal_sizes(**given)
    assert reachable == ({1, 2, 3, 4, 6, 8} if batch == 4 else {*range(1, 9)})
    for size in range(1, 9):
        if size in reachable:
            found = resized(parse_layout(text), TINY, world_size=size, **given)
            assert problems(found, TINY, world_size=size, **given) == ()
        else:
            with pytest.raises(LayoutError):
                resized(parse_layout(text), TINY, world_size=size, **given)


def test_a_size_without_a_layout_is_refused_with_the_rule_and_the_nearest_sizes():
    with pytest.raises(LayoutError) as refusal:
        resized(parse_layout("fsdp4"), TINY, world_size=5, num_microbatches=4)

    assert str(refusal.value).splitlines() == [
        "no layout of 5 ranks is legal here; nearest sizes that have one: 4 and 6",
        "  - fsdp5: 4 micro-batches over 5 data ranks leave 0 for some; each needs at least one: 5 in all",
        "nearest legal: fsdp4, fsdp3.tp2",
    ]


def test_a_size_beyond_all_that_are_legal_names_the_largest_near_it():
    with pytest.raises(LayoutError, match=r"nearest sizes that have one: 32\n") as refusal:
        resized(parse_layout("pp4"), TINY, world_size=37, num_microbatches=4)

    assert refusal.value.nearest == ("pp4.tp8",)


@pytest.mark.parametrize("size", [0, -3, 70000, 10**18])
def test_a_size_that_no_layout_has_is_refused(size):
    with pytest.raises(LayoutError, match="a world has 1 to 65536 ranks"):
        resized(parse_layout("fsdp4"), TINY, world_size=size)


def test_a_world_of_equal_size_keeps_its_layout():
    pinned = parse_layout("pp2_1_3.fsdp2.tp2-sp.order_0_2_1_3_4_6_5_7")
    assert resized(pinned, TINY, world_size=8, num_microbatches=8, sequence=64) == pinned


def test_among_equally_near_layouts_the_fewest_bytes_decide_then_the_text():
    present = parse_layout("pp2.tp2")
    asked = []

    def moved(layout):
        asked.append(print_layout(layout))
        return 0 if layout.size("tp") > 1 else 1

    assert print_layout(resized(present, TINY, world_size=2, moved=moved)) == "tp2"
    assert asked == ["pp2", "tp2"]
    assert print_layout(resized(present, TINY, world_size=2)) == "pp2"
    assert print_layout(resized(present, TINY, world_size=2, moved=lambda _layout: 7)) == "pp2"
    asked.clear()
    assert print_layout(resized(parse_layout("fsdp4"), TINY, world_size=8, moved=moved)) == "fsdp8"
    assert asked == []
