"""Ownership read from live modules is the ownership that the catalogue declares, for every layout and many shapes."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.jobs import SHAPE, TEN, Case, everywhere

from dynatrain.layout.legality import problems
from dynatrain.layout.text import parse_layout
from dynatrain.models.decoder import canonical_name
from dynatrain.plan.storage import PieceTable
from dynatrain.space.box import shape_of, volume
from dynatrain.space.decoder import catalogue
from dynatrain.space.ownership import declared
from dynatrain.space.tensor import State
from dynatrain.train.groups import GroupPool, building
from dynatrain.train.live import describe, entries, merge
from dynatrain.train.torch_private import local_tensor

MORE = (
    "fsdp4-z1",
    "fsdp2-z2.tp2",
    "pp2_1_3.fsdp2",
    "tp2.fsdp2",
    "fsdp2.pp2",
    "fsdp2.tp2.order_0_2_1_3",
    "pp2.fsdp2.order_3_1_0_2",
    "dp2.tp2-sp.order_2_0_3_1",
    "pp2_3_1.tp2.order_1_3_0_2",
    "pp2v2.fsdp2",
    "pp2v2.tp2-sp.order_1_3_0_2",
    "pp2-zb.fsdp2-z2",
    "pp2v2-zbv.fsdp2-z1",
)
UNEVEN = replace(
    SHAPE,
    hidden_size=60,
    intermediate_size=252,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=10,
    vocab_size=251,
)
SHAPES = {
    "even, untied": SHAPE,
    "uneven, tied, with norms of heads": replace(UNEVEN, tie_word_embeddings=True, qk_norm=True),
    "gpt2, uneven, tied": replace(
        UNEVEN, family="gpt2", head_dim=15, tie_word_embeddings=True, max_position_embeddings=63
    ),
    "fewer key/value heads than tp ranks": replace(UNEVEN, num_key_value_heads=2, qk_norm=True),
    "one key/value head, uneven": replace(UNEVEN, num_key_value_heads=1, head_dim=6),
    "uneven in every row, untied": replace(
        UNEVEN, hidden_size=58, intermediate_size=250, num_attention_heads=2, num_key_value_heads=2, head_dim=6
    ),
}
CASES = {
    (name, text): (shape, parse_layout(text))
    for name, shape in SHAPES.items()
    for text in (TEN if name == "even, untied" else TEN + MORE)
    if "tp" in text or shape.num_key_value_heads == shape.num_attention_heads or name == "even, untied"
    if not problems(parse_layout(text), shape.limits(), world_size=4)
}


def read(world):
    """Of each case: placements of all tensors, shapes of this rank's shards, and elements of their storage."""
    groups = GroupPool(
        dist.PrefixStore("groups", world.store), rank=world.rank, world="g0", backend="gloo", timeout_seconds=60
    )
    found = {}
    for case, (shape, layout) in CASES.items():
        mesh = groups.mesh(layout, "cpu")
        with building(groups, layout, "cpu"), torch.device("meta"):
            parts, _ = Case(tour=(), shape=shape).job().build(mesh, layout)
        live = entries(parts, canonical_name)
        states = {name: (State("param", "float64"),) for name in live}
        told = [None] * world.size
        dist.all_gather_object(told, describe(live, states, layout, world.rank))
        tensors, ownership = merge(told, layout)
        found[case] = (
            {tensor.name: tensor.shape for tensor in tensors},
            dict(ownership.placements),
            {name: (tuple(local_tensor(entry.value).shape), entry.stored) for name, entry in live.items()},
        )
    return found


@pytest.fixture(scope="module")
def found():
    return everywhere(4, read, 200)


def test_every_legal_layout_is_read():
    assert len(CASES) > 40
    assert {text for _, text in CASES} == {*TEN, *MORE}


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_what_is_read_is_what_is_declared(found, case):
    shape, layout = CASES[case]
    tensors = {tensor.name: tensor for tensor in catalogue(shape)}
    ownership = declared(catalogue(shape), layout, shape.num_hidden_layers)
    table = PieceTable(ownership, layout.world_size)

    for rank, cases in enumerate(found):
        shapes, placements, shards = cases[case]
        assert shapes == {name: tensor.shape for name, tensor in tensors.items()}
        assert placements == ownership.placements
        boxes = {name: box for name, tensor in tensors.items() if (box := ownership.box(tensor, rank)) is not None}
        assert shards.keys() == boxes.keys()
        for name, (local, stored) in shards.items():
            # An empty shard has no shape of its own in torch.
            assert local == shape_of(boxes[name]) or (volume(boxes[name]) == 0 and torch.Size(local).numel() == 0)
            pieces = table.pieces(tensors[name].shape, ownership.placements[name])
            assert stored == pieces.elements(padded=True)[rank]


def test_another_rank_order_is_noticed(found):
    _, layout = CASES["uneven in every row, untied", "fsdp2.tp2.order_0_2_1_3"]
    shape = SHAPES["uneven in every row, untied"]
    tensors = {tensor.name: tensor for tensor in catalogue(shape)}
    wrong = declared(catalogue(shape), replace(layout, order=()), shape.num_hidden_layers)

    _, _, shards = found[1]["uneven in every row, untied", "fsdp2.tp2.order_0_2_1_3"]
    assert any(local != shape_of(wrong.box(tensors[name], 1)) for name, (local, _) in shards.items())
