"""Who holds the same box, against all pairs of ranks; what differs among them is found, named and counted."""

import pytest
import torch

from dynatrain.layout.text import parse_layout
from dynatrain.plan.replicas import named, peers, unlike
from dynatrain.space.box import volume
from dynatrain.space.decoder import catalogue
from dynatrain.space.ownership import declared
from dynatrain.space.presets import resolve_model
from dynatrain.train.replicas import Replicas

SHAPE = resolve_model("tiny")
TENSORS = catalogue(SHAPE, optimizer="adamw")


@pytest.mark.parametrize("text", ["dp1", "dp2", "fsdp4", "dp2.fsdp2", "pp2.dp2", "tp2.dp2", "pp2.fsdp2.tp2"])
def test_peers_are_the_ranks_with_an_equal_box(text):
    layout = parse_layout(text)
    owner = declared(TENSORS, layout, SHAPE.num_hidden_layers)
    for rank in layout.ranks:
        found = peers(TENSORS, owner, rank)
        for index, tensor in enumerate(TENSORS):
            for number, state in enumerate(tensor.states):
                mine = owner.state_box(tensor, state, rank)
                same = [other for other in layout.ranks if owner.state_box(tensor, state, other) == mine]
                alone = mine is None or not volume(mine) or len(same) == 1
                assert found.get((index, number)) == (None if alone else ",".join(map(str, same)))


def replicas_of(values):
    """One rank's, which holds with rank 0 and 1 the first two states of each tensor."""
    made = Replicas(TENSORS, {(index, number): "0,1" for index in range(3) for number in range(2)})
    for (index, number), value in values.items():
        made.note((index, number), value)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float64])
def test_one_bit_that_differs_is_found_and_named(dtype):
    values = {(index, number): torch.ones(2, 3).to(dtype) for index in range(3) for number in range(2)}
    other = {granule: value.clone() for granule, value in values.items()} | {(1, 0): values[1, 0].t().contiguous().t()}
    one, two = replicas_of(values), replicas_of(other)
    assert unlike([one.told(), two.told()]) == ()

    other[2, 1][1, 2] = 0
    two = replicas_of(other)
    (who,) = differ = unlike([one.told(), two.told()])
    name, state = TENSORS[2].name, TENSORS[2].states[1].name
    said = named([one.each(differ), two.each(differ)])
    assert who == "0,1"
    assert said == f"{name} {state} is not equal in all copies: ranks [1] differ from rank 0"


def test_what_is_nobody_else_s_is_not_hashed_and_many_differences_are_counted():
    alone = Replicas(TENSORS, {})
    alone.note((0, 0), torch.ones(2))
    assert alone.told() == {}
    told = [{"0,1": {f"t{i} param": str(i + rank) for i in range(6)}} for rank in range(2)]
    assert named(told).endswith("t3 param is not equal in all copies: ranks [1] differ from rank 0; 2 more states")
