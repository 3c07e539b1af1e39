import pytest

from dynatrain.layout.form import LayoutError
from dynatrain.layout.layout import Layout
from dynatrain.layout.text import parse_layout, print_layout, short_layout

SPELLINGS = {
    "dp1": Layout(),
    "dp2.fsdp2.tp2": Layout(axes=(("dp", 2), ("fsdp", 2), ("tp", 2))),
    "tp2.dp4": Layout(axes=(("tp", 2), ("dp", 4))),
    "pp4_2_3_4_3": Layout(axes=(("pp", 4),), stages=(2, 3, 4, 3)),
    "fsdp4-z2": Layout(axes=(("fsdp", 4),), zero=2),
    "fsdp4-z1.tp2-sp": Layout(axes=(("fsdp", 4), ("tp", 2)), zero=1, sp=True),
    "cp2": Layout(axes=(("cp", 2),)),
    "fsdp2-z2.cp2-ring.tp2": Layout(axes=(("fsdp", 2), ("cp", 2), ("tp", 2)), zero=2, cp_method="ring"),
    "cp2-ulysses-z1": Layout(axes=(("cp", 2),), zero=1, cp_method="ulysses"),
    "pp2v2.dp2": Layout(axes=(("pp", 2), ("dp", 2)), chunks=2),
    "pp2v2_1_2_2_1-zbv": Layout(axes=(("pp", 2),), chunks=2, stages=(1, 2, 2, 1), schedule="zbv"),
    "pp3-zb": Layout(axes=(("pp", 3),), schedule="zb"),
    "fsdp8.ep4.etp2": Layout(axes=(("fsdp", 8),), ep=4, etp=2),
    "tp4.fsdp2.ep8.order_1_0_2_3_4_5_6_7": Layout(axes=(("tp", 4), ("fsdp", 2)), ep=8, order=(1, 0, 2, 3, 4, 5, 6, 7)),
    "fsdp2.tp2.order_0_2_1_3": Layout(axes=(("fsdp", 2), ("tp", 2)), order=(0, 2, 1, 3)),
}

# text: (what the message must name, the spelling it must offer)
MALFORMED = {
    "": ("empty", "dp1"),
    "fsdp-4": ("'fsdp-4'", "fsdp4"),
    "ddp4": ("'ddp4'", "dp4"),
    "dp=2.tp=2": ("'tp=2'", "dp2.tp2"),
    "DP2,TP2": ("'DP2,TP2'", "dp2.tp2"),
    " dp2": ("' dp2'", "dp2"),
    "dp2..tp2": ("''", "dp2.tp2"),
    "dp02": ("'dp02'", "dp2"),
    "dp0": ("'dp0'", "dp1"),
    "dp1.tp2": ("dp1", "tp2"),
    "dp1.dp1": ("dp1", "dp1"),
    "dp2.dp2": ("dp appears 2 times", "dp2"),
    "tp2sp": ("'tp2sp'", "tp2-sp"),
    "tp2-sq": ("-sq is not an option", "tp2-sp"),
    "tp2-z1": ("-z1 belongs to fsdp", "tp2"),
    "fsdp4-z3": ("leave -z3 out", "fsdp4"),
    "fsdp4-z1-z2": ("one option", "fsdp4"),
    "tp2-sp-sp": ("one option", "tp2-sp"),
    "dp2_1_1": ("layers per stage belong to pp", "dp2"),
    "pp2_1": ("1 stages are pinned", "pp2"),
    "pp2_0_3": ("at least one layer", "pp2"),
    "pp=2_3_1": ("'pp=2_3_1'", "pp2_3_1"),
    "cp-2": ("'cp-2'", "cp2"),
    "cp2-rung": ("-rung is not an option", "cp2-ring"),
    "cp2-z1-ring": ("ZeRO's stage comes last", "cp2-ring-z1"),
    "cp2-ring-ulysses": ("one option of a kind", "cp2"),
    "dp2.tp2-ring": ("-ring belongs to cp, not to tp", "dp2.tp2"),
    "fsdp2.cp2-z2": ("ZeRO's stage stands behind fsdp", "fsdp2.cp2"),
    "ep4": ("ep4 x etp1 = 4 does not divide the 1 ranks", "dp1"),
    "fsdp4.ep8": ("ep8 x etp1 = 8 does not divide the 4 ranks of fsdp x cp x tp", "fsdp4"),
    "fsdp4.ep1": ("'ep1'", "fsdp4"),
    "ep2.fsdp4": ("ep and etp stand, in this order, behind", "fsdp4"),
    "fsdp4.etp2.ep2": ("ep and etp stand, in this order, behind", "fsdp4"),
    "fsdp4.ep2.ep2": ("ep appears 2 times", "fsdp4"),
    "fsdp4.ep2-sp": ("-sp belongs to tp, not to ep", "fsdp4.ep2"),
    "dp2v2": ("interleaved stages (v) belong to pp, not to dp", "dp2"),
    "pp2v1": ("v1 goes without saying", "pp2"),
    "pp2v0": ("'pp2v0'", "pp2"),
    "pp2v2_1_1": ("2 stages are pinned (1_1) but pp2v2 has 4", "pp2"),
    "pp2-zbv": ("-zbv lays two stages on each pp rank, here 1", "pp2"),
    "pp2v3-zbv": ("write pp2v2-zbv", "pp2"),
    "pp2v2zbv": ("'pp2v2zbv'", "pp2v2-zbv"),
    "dp2-zb": ("-zb belongs to pp, not to dp", "dp2"),
    "fsdp2.order-1a2b3c4d": ("not as a hash", "fsdp2"),
    "fsdp2.order_ab12": ("not as a hash", "fsdp2"),
    "fsdp2.order_12345678": ("write the order in full", "fsdp2"),
    "fsdp2.order_0_0": ("twice 0, missing 1", "fsdp2"),
    "order_1_0.dp2": ("the order comes last", "dp2"),
    "order_0": ("one rank is dp1", "dp1"),
    "dp2x4": ("'dp2x4'", "dp2"),
    "0": ("'0'", "dp1"),
    "dp4;rm": ("'dp4;rm'", "dp4"),
    "dp1000000": ("1000000 ranks; at most 65536", "dp65536"),
    "dp99999999999999999999": ("a number of 20 digits; a layout has at most 65536 ranks", "dp65536"),
    "pp2.dp" + 5000 * "9": ("5000 digits", "pp2"),
    "dp60000.tp60000": ("3600000000 ranks", "dp60000"),
    "dp2.order_0_" + 5000 * "1": ("5000 digits", "dp2"),
}


@pytest.mark.parametrize("text", SPELLINGS)
def test_a_canonical_text_reads_as_its_layout_and_prints_back(text):
    assert parse_layout(text) == SPELLINGS[text]

    assert print_layout(SPELLINGS[text]) == text


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_text_is_refused_with_its_offending_part_and_the_legal_spelling_meant(text):
    named, meant = MALFORMED[text]

    with pytest.raises(LayoutError) as caught:
        parse_layout(text)

    assert named in str(caught.value)
    assert caught.value.nearest == (meant,)


def test_every_bad_part_is_reported_at_once():
    with pytest.raises(LayoutError) as caught:
        parse_layout("dq2.tp2-z1.dp2v2")

    assert len(caught.value.problems) == 3


def test_an_identity_order_reads_and_prints_as_none():
    assert parse_layout("dp2.tp2.order_0_1_2_3") == parse_layout("dp2.tp2")

    assert print_layout(Layout(axes=(("dp", 2),), order=(0, 1))) == "dp2"


def test_a_long_order_shows_as_a_hash_that_is_refused_as_input():
    layout = Layout(axes=(("fsdp", 32),), order=tuple(reversed(range(32))))

    shown = short_layout(layout)

    assert len(shown) < 24
    assert parse_layout(print_layout(layout)) == layout
    with pytest.raises(LayoutError, match="not as a hash"):
        parse_layout(shown)


def test_a_short_order_shows_in_full():
    assert short_layout(parse_layout("dp2.order_1_0")) == "dp2.order_1_0"
