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
    "tp2-sp-sp": ("one option", "tp2"),
    "dp2_1_1": ("layers per stage belong to pp", "dp2"),
    "pp2_1": ("1 stages are pinned", "pp2"),
    "pp2_0_3": ("at least one layer", "pp2"),
    "pp=2_3_1": ("'pp=2_3_1'", "pp2_3_1"),
    "cp2.dp2": ("context parallel (cp) is not built yet", "dp2"),
    "ep4": ("expert parallel (ep) is not built yet", "dp1"),
    "etp2": ("expert tensor parallel (etp) is not built yet", "dp1"),
    "pp2v2.dp2": ("interleaved stages (v) are not built yet", "pp2.dp2"),
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
        parse_layout("dq2.tp2-z1.cp2")

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
