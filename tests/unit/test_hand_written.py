"""The plan that an engineer would write by hand, carried out on arrays: every element comes, from who has it."""

import numpy as np
import pytest

from dynatrain.layout.text import parse_layout
from dynatrain.space.box import intersect, shape_of, volume, whole
from dynatrain.space.decoder import catalogue
from dynatrain.space.ownership import declared
from dynatrain.space.presets import resolve_model
from dynatrain.train import hand_written
from dynatrain.train.hand_written import plan_by_hand

SHAPE = resolve_model("tiny")
CATALOGUE = catalogue(SHAPE)


def owner(text):
    return declared(CATALOGUE, parse_layout(text), SHAPE.num_hidden_layers)


def cut_out(array, box):
    return array[tuple(slice(*ends) for ends in box)]


@pytest.mark.parametrize(
    ("old", "new"), [("fsdp4", "fsdp2.tp2"), ("fsdp3", "pp2.fsdp2"), ("dp2.fsdp2", "tp4"), ("pp2.tp2", "fsdp5")]
)
def test_every_box_is_filled_from_those_who_have_it(old, new):
    before, after = owner(old), owner(new)
    for tensor, (name, states) in zip(CATALOGUE, plan_by_hand(CATALOGUE, before, after), strict=True):
        assert name == tensor.name
        for state, (_, cuts) in zip(tensor.states, states, strict=True):
            shape = tensor.state_shape(state)
            everything = np.arange(volume(whole(shape))).reshape(shape)
            for rank in after.layout.ranks:
                box = after.state_box(tensor, state, rank)
                if box is None:
                    assert not [cut for cut in cuts if cut.to == rank]
                    continue
                filled = np.full(shape_of(box), -1)
                for cut in (cut for cut in cuts if cut.to == rank):
                    shard = cut_out(everything, before.state_box(tensor, state, cut.frm))
                    assert (filled[cut.put] == -1).all()
                    filled[cut.put] = shard[cut.taken]
                assert (filled == cut_out(everything, box)).all(), (tensor.name, state.name, rank)


def test_who_has_an_element_takes_it_from_nobody_else_and_copies_are_sent_in_turn():
    before = owner("dp2")
    cuts = [cut for _, states in plan_by_hand(CATALOGUE, before, owner("fsdp2")) for _, its in states for cut in its]
    assert {(cut.frm, cut.to) for cut in cuts} == {(0, 0), (1, 1)}
    grown = [cut for _, states in plan_by_hand(CATALOGUE, before, owner("fsdp4")) for _, its in states for cut in its]
    assert {(cut.frm, cut.to) for cut in grown} == {(0, 0), (1, 1), (0, 2), (1, 3)}


def test_a_hole_is_seen_before_anything_travels(monkeypatch):
    def holed(one, other):
        common = intersect(one, other)
        return None if common and common[0][0] else common

    monkeypatch.setattr(hand_written, "intersect", holed)
    with pytest.raises(AssertionError, match=r"rank \d gets \d+ elements"):
        plan_by_hand(CATALOGUE, owner("fsdp4"), owner("tp4"))
