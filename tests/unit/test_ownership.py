"""Who owns what under layouts that are small enough to write down."""

import itertools

import pytest
from tests.plans.cases import IN, OUT, STATES, layout

from dynatrain.layout.layout import Layout
from dynatrain.layout.stages import stage_ranks
from dynatrain.layout.text import parse_layout
from dynatrain.space.ownership import cuts_under, declared
from dynatrain.space.tensor import FIRST, LAST, Tensor


def tensor(shape, cuts, anchors=(0,)):
    return Tensor("t", shape, cuts, anchors, STATES, "layers.0")


def rows(text, one, dim=0, layers=1):
    """``(first, end)`` along one dim on every rank; None where a rank holds nothing."""
    own = declared((one,), parse_layout(text), layers)
    boxes = [own.box(one, rank) for rank in range(own.layout.world_size)]
    return [None if box is None else box[dim] for box in boxes]


def test_context_ranks_shard_parameters_as_fsdp_ranks_do():
    one = tensor((8, 2), (("tp", 0), ("fsdp", 0)))

    assert rows("fsdp2.cp2", one) == rows("fsdp4", one) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert rows("cp2.fsdp2", one) == [(0, 2), (4, 6), (2, 4), (6, 8)]  # fsdp is the outer digit whatever the rank order


@pytest.mark.parametrize("size", [1, 5, 6, 7, 11, 17])
@pytest.mark.parametrize("order", ["fsdp{}.tp{}", "tp{1}.fsdp{0}"])
def test_rows_that_do_not_divide_are_dealt_out_once_and_in_order(size, order):
    one = tensor((size,), (("tp", 0), ("fsdp", 0)))
    for fsdp, tp in itertools.product((2, 3, 4), repeat=2):
        where = parse_layout(order.format(fsdp, tp))
        held = {(where.index("tp", rank), where.index("fsdp", rank)): rank for rank in range(fsdp * tp)}
        ends = rows(order.format(fsdp, tp), one)
        in_order = [ends[held[place]] for place in itertools.product(range(tp), range(fsdp))]
        assert [row for first, end in in_order for row in range(first, end)] == list(range(size))
        of_tp = -(-size // tp)
        assert max(end - first for first, end in ends) == -(-of_tp // fsdp)


def test_an_expert_keeps_its_global_number():
    stack = tensor((4, 6, 2), OUT)

    assert rows("fsdp2.ep2", stack) == [(0, 2), (2, 4)]
    assert rows("fsdp4.ep4", stack) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert rows("fsdp4.ep2", stack) == [(0, 1), (2, 3), (1, 2), (3, 4)]  # efsdp is the outer digit
    assert rows("fsdp2.tp2.ep2.etp2", stack) == [(0, 2), (0, 2), (2, 4), (2, 4)]
    assert rows("fsdp2.tp2.ep2.etp2", stack, dim=1) == [(0, 3), (3, 6), (0, 3), (3, 6)]
    assert rows("fsdp2.tp2.ep2.etp2", tensor((4, 2, 6), IN), dim=2) == [(0, 3), (3, 6), (0, 3), (3, 6)]


def test_more_ranks_than_experts_cut_the_dim_to_spare_if_that_is_even():
    shape = {"even": (2, 6, 8), "uneven": (2, 6, 7)}
    layout_ = parse_layout("fsdp8.ep2")

    assert cuts_under(layout_, tensor(shape["even"], OUT)) == (("ep", 0), ("efsdp", 2))
    assert cuts_under(layout_, tensor(shape["uneven"], OUT)) == (("ep", 0), ("efsdp", 0))
    assert cuts_under(layout_, tensor((2, 8, 6), IN)) == (("ep", 0), ("efsdp", 1))
    assert cuts_under(layout_, tensor((8, 6, 8), OUT)) == (("ep", 0), ("efsdp", 0))  # an expert for each rank


def test_more_tp_ranks_than_heads_hold_copies_side_by_side():
    keys = tensor((6, 4), (("tp2", 0), ("fsdp", 0)))
    own = declared((keys,), layout(tp=4), 1)

    assert rows("tp4", keys) == [(0, 3), (0, 3), (3, 6), (3, 6)]
    assert rows("tp2", keys) == [(0, 3), (3, 6)]
    assert own.copies(keys) == 2
    assert [own.copy_index(keys, rank) for rank in range(4)] == [0, 1, 0, 1]
    assert own.placements["t"].cuts == (("tp2", 0),)
    assert declared((keys,), layout(tp=2), 1).placements["t"].cuts == (("tp", 0),)


def test_tp_ranks_that_do_not_deal_out_the_heads_are_refused_with_the_numbers():
    keys = tensor((6, 4), (("tp2", 0),))

    with pytest.raises(ValueError, match="tp3 does not deal out 2 parts evenly"):
        declared((keys,), layout(tp=3), 1)


def test_a_tensor_is_not_cut_over_the_same_ranks_twice():
    mixed = tensor((4, 4), (("ep", 0), ("fsdp", 1)))

    with pytest.raises(ValueError, match="ep, fsdp cut over ranks that they share"):
        declared((mixed,), layout(fsdp=4, ep=2), 1).copies(mixed)


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("pp2", [0, 0, 1, 1]),
        ("pp2v2", [0, 1, 0, 1]),
        ("pp2v2-zb", [0, 1, 0, 1]),
        ("pp2v2-zbv", [0, 1, 1, 0]),
        ("pp2v2_1_1_1_1-zbv", [0, 1, 1, 0]),
        ("pp2_1_3", [0, 1, 1, 1]),
    ],
)
def test_layers_lie_on_the_ranks_of_their_stages(text, held):
    layers = tuple(Tensor(f"layers.{i}", (2,), (), (i,), STATES, f"layers.{i}") for i in range(4))
    placements = declared(layers, parse_layout(text), 4).placements

    assert [placements[f"layers.{i}"].stages for i in range(4)] == [(rank,) for rank in held]


@pytest.mark.parametrize(("text", "stages"), [("pp2v2", (0, 1)), ("pp2v2-zbv", (0,)), ("pp4", (0, 3)), ("dp2", (0,))])
def test_a_tied_embedding_lies_where_the_first_and_the_last_stage_are(text, stages):
    tied = tensor((4, 2), (("fsdp", 0),), (FIRST, LAST))

    assert declared((tied,), parse_layout(text), 4).placements["t"].stages == stages


def test_a_v_of_three_ranks_goes_down_and_up():
    assert stage_ranks(parse_layout("pp3v2-zbv")) == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("text", ["dp2.fsdp2.cp2.tp2", "tp2.cp2.pp2.fsdp2.order_15_2_1_3_4_5_6_7_8_9_10_11_12_13_14_0"])
def test_a_rank_and_its_number_are_inverses(text):
    where = parse_layout(text)

    assert [where.rank_of(where.number(rank)) for rank in range(16)] == list(range(16))
    assert sorted(map(where.number, range(16))) == list(range(16))


def test_a_layout_knows_no_other_axes():
    with pytest.raises(ValueError, match="xp is no axis that places state"):
        Layout().digit("xp")
