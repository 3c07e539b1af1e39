"""What ranks tell of extra state before a switch, and what each makes of it: without ranks."""

import json

import pytest
import torch
from torch import nn

from dynatrain.layout.text import parse_layout
from dynatrain.models.names import strip_wrappers
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.extra_state import extra_states, give_extra_states, hear, owners, speaks, tell
from dynatrain.train.states import UnknownStateError


class Scaled(nn.Module):
    def __init__(self, value=0.0):
        super().__init__()
        self.scale = torch.tensor(value)

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def stage(**values):
    """The owners of one part whose modules have these names and values."""
    return owners([nn.ModuleDict({name: Scaled(value) for name, value in values.items()})], strip_wrappers)


def told(*ranks, speak=(0, 1)):
    """What the ranks, each ``(old, new)``, tell one another."""
    return json.loads(json.dumps([tell(old, new, speaks=rank in speak) for rank, (old, new) in enumerate(ranks)]))


def values(found):
    return {owner.name: float(owner.module.scale) for owner in found}


def test_each_module_gets_what_its_name_had_on_whatever_rank_and_a_copy_of_it():
    one = stage(a=1.0, b=2.0, all=9.0), stage(b=0.0, d=0.0, all=0.0)
    other = stage(c=3.0, d=4.0, all=9.0), stage(a=0.0, c=0.0, all=0.0)
    heard = told(one, other)
    for old, new in (one, other):
        give_extra_states(new, hear(heard, old, new, torch.device("cpu")))

    assert values(one[1]) == {"b": 2.0, "d": 4.0, "all": 9.0}
    assert values(other[1]) == {"a": 1.0, "c": 3.0, "all": 9.0}
    one[0][1].module.scale += 1
    assert values(one[1])["b"] == 2.0


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ((stage(a=1.0), stage(b=0.0)), (stage(b=1.0), stage(b=0.0)), "no module a is there for its extra state"),
        ((stage(a=1.0), stage(a=0.0)), (stage(a=1.0), stage(c=0.0)), "there is no extra state for c of rank 1"),
        ((stage(b=1.0), stage(a=0.0)), (stage(a=1.0), stage(b=0.0)), ""),
        (
            (stage(a=1.0), stage(a=0.0)),
            (stage(a=2.0), stage(a=0.0)),
            "a is not equal on all ranks: ranks [1] differ from",
        ),
    ],
)
def test_what_is_lost_new_or_unequal_is_refused_on_every_rank_alike(one, other, said):
    heard, found = told(one, other), set()
    for old, new in (one, other):
        try:
            hear(heard, old, new, torch.device("cpu"))
        except SwitchAbortedError as refused:
            found.add(str(refused))
    assert len(found) == bool(said)
    assert all(said in text for text in found)


def test_without_a_rank_that_speaks_a_module_that_comes_to_a_rank_is_refused():
    ranks = (stage(a=1.0), stage(a=0.0)), (stage(b=1.0), stage(a=0.0, b=0.0))
    with pytest.raises(SwitchAbortedError, match="no extra state for a of rank 1"):
        hear(told(*ranks, speak=()), *ranks[0], torch.device("cpu"))


def test_parts_of_one_rank_that_have_a_module_of_one_name_have_one_value():
    assert {name: float(state["scale"]) for name, state in extra_states(stage(a=1.0) + stage(a=1.0)).items()} == {
        "a": 1
    }
    with pytest.raises(UnknownStateError, match="a is not equal in all stages of this rank"):
        extra_states(stage(a=1.0) + stage(a=2.0))


def test_names_follow_the_users_rule_and_a_part_itself_is_the_model():
    part = Scaled()
    part.blocks = nn.ModuleList([Scaled()])

    assert [owner.name for owner in owners([part], strip_wrappers)] == ["the model", "blocks.0"]
    assert [owner.name for owner in owners([part], lambda _part, path: f"net.{path}")] == ["net", "net.blocks.0"]


def test_one_rank_of_each_stage_speaks():
    layout = parse_layout("pp2.fsdp2.order_3_1_0_2")

    assert [speaks(layout, rank) for rank in range(4)] == [True, False, False, True]
    assert [speaks(parse_layout("fsdp2.tp2"), rank) for rank in range(4)] == [True, False, False, False]
