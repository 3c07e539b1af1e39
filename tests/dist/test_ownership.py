"""Ownership read from live modules is the ownership that the catalogue declares, for every layout and many shapes."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.backward import groups_of
from tests.dist import test_segments as fused
from tests.jobs import SHAPE, TEN, Case, everywhere
from tests.shapes import DEEPSEEK, LATENT

from dynatrain.layout.legality import problems
from dynatrain.layout.text import parse_layout
from dynatrain.models.decoder import canonical_name
from dynatrain.models.names import strip_wrappers
from dynatrain.plan.storage import PieceTable
from dynatrain.space.box import shape_of, volume
from dynatrain.space.decoder import catalogue
from dynatrain.space.ownership import declared
from dynatrain.space.tensor import State
from dynatrain.train.groups import building
from dynatrain.train.live import describe, entries, find_slots, merge
from dynatrain.train.segments import Segments
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
CONTEXTS = (
    "cp4",
    "cp2-ring.tp2",
    "tp2.cp2-ulysses",
    "dp2.cp2",
    "cp2.fsdp2-z1",
    "pp2.cp2-z2",
    "pp2v2.cp2.order_2_0_3_1",
)
EXPERTS = (
    "fsdp4.ep4",
    "fsdp4.ep2",
    "fsdp4.etp4",
    "tp4-sp.ep2.etp2",
    "fsdp2.tp2.ep2",
    "cp2.tp2.ep4",
    "tp2.fsdp2.etp2.order_3_1_0_2",
    "dp2.fsdp2.ep2",
    "dp2.tp2.etp2",
    "pp2.fsdp2.ep2",
    "pp2v2.cp2.etp2",
    "pp2-zb.tp2.ep2.order_1_3_0_2",
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
OF_EXPERTS = replace(
    DEEPSEEK,
    num_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=12,
    n_shared_experts=1,
)
SHAPES |= {
    "experts in every layer, softmax": replace(
        UNEVEN, experts=replace(OF_EXPERTS, gate="softmax", n_shared_experts=0, first_k_dense_replace=0)
    ),
    "a dense layer, then experts with a shared one; latents; tied": replace(
        UNEVEN, experts=OF_EXPERTS, latent=LATENT, head_dim=LATENT.head_dim, tie_word_embeddings=True
    ),
}
TEXTS = dict.fromkeys(SHAPES, TEN + MORE) | {
    "even, untied": TEN,
    "uneven, tied, with norms of heads": TEN + MORE + CONTEXTS,
    "experts in every layer, softmax": EXPERTS,
    "a dense layer, then experts with a shared one; latents; tied": CONTEXTS + EXPERTS,
}
CASES = {
    (name, text): (shape, parse_layout(text))
    for name, shape in SHAPES.items()
    for text in TEXTS[name]
    if "tp" in text or shape.num_key_value_heads == shape.num_attention_heads or name == "even, untied"
    if not problems(parse_layout(text), shape.limits(), world_size=4)
}


def read(world):
    """Of each case: placements of all tensors, shapes of this rank's shards, and elements of their storage."""
    groups, found = groups_of(world), {}
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
    assert {text for _, text in CASES} == {*TEN, *MORE, *CONTEXTS, *EXPERTS}


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
            assert stored == pieces.stored(padded=True)[rank]


def test_another_rank_order_is_noticed(found):
    _, layout = CASES["uneven in every row, untied", "fsdp2.tp2.order_0_2_1_3"]
    shape = SHAPES["uneven in every row, untied"]
    tensors = {tensor.name: tensor for tensor in catalogue(shape)}
    wrong = declared(catalogue(shape), replace(layout, order=()), shape.num_hidden_layers)

    _, _, shards = found[1]["uneven in every row, untied", "fsdp2.tp2.order_0_2_1_3"]
    assert any(local != shape_of(wrong.box(tensors[name], 1)) for name, (local, _) in shards.items())


FUSED_IN = ("dp4", "fsdp4", "fsdp2.tp2", "tp2.fsdp2", "dp2.tp2", "fsdp2.tp2.order_0_3_1_2")
ROWS_OF = {
    name: [rows if isinstance(rows, int) else rows[0] for rows in of.values()] for name, of in fused.SEGMENTS.items()
}
WHOLE = {name: rows for of, sizes in ROWS_OF.items() for name, rows in zip(fused.SEGMENTS[of], sizes, strict=True)}
WHOLE |= fused.PADDED
NOBODYS = -1.0


class Labelled(fused.Net):
    """Every row of a fused tensor says which segment's it is, and which of its rows; of the padded one, or nobody's."""

    def __init__(self, tp, **how):
        super().__init__(tp, **how)
        for path, param in self.named_parameters():
            module = path.rpartition(".")[0]
            rows = torch.full((len(param),), NOBODYS)
            if module in ROWS_OF:  # a tp rank's part has its rows of each segment
                parts = [(torch.arange(n) + 100 * i).chunk(tp) for i, n in enumerate(ROWS_OF[module])]
                rows = torch.cat([one for of_rank in zip(*parts, strict=True) for one in of_rank])
            elif module in fused.PADDED:
                rows[: fused.PADDED[module]] = torch.arange(fused.PADDED[module])
            with torch.no_grad():
                param.copy_(rows.view(-1, *[1] * (param.ndim - 1)).expand_as(param))


def read_labels(world):
    """Of each layout and logical tensor: its box on this rank as it is read, the labels there, and those in no slot."""
    groups, segments, found = groups_of(world), Segments(fused=fused.SEGMENTS, padded=fused.PADDED), {}
    for layout in map(parse_layout, FUSED_IN):
        mesh = groups.mesh(layout, "cpu")
        with pytest.MonkeyPatch.context() as patch, building(groups, layout, "cpu"):
            patch.setattr(fused, "Net", Labelled)
            net, _ = fused.build(mesh, layout)
        live = entries([net], strip_wrappers)
        find_slots(live, segments, layout, world.rank)
        told = [None] * world.size
        states = {name: (State("param", "float64"),) for name in live}
        dist.all_gather_object(told, describe(live, states, layout, world.rank))
        tensors, ownership = merge(told, layout)
        boxes = {tensor.name: ownership.box(tensor, world.rank) for tensor in tensors}
        for entry in live.values():
            local = local_tensor(entry.value).detach()
            labels = (local[:, 0] if local.ndim > 1 else local).tolist()
            for slot in entry.slots:
                mine = labels[slot.first : slot.first + slot.rows]
                found[layout, slot.name] = boxes[slot.name][0], [label - 100 * slot.number for label in mine]
            held = sum(slot.rows for slot in entry.slots)
            assert not entry.slots or set(labels[held:]) <= {NOBODYS}
    return found


def test_rows_of_fused_and_padded_tensors_lie_where_ownership_says():
    told = everywhere(4, read_labels)

    assert len(told[0]) == len(FUSED_IN) * 11
    for key in told[0]:
        for of_rank in told:
            (first, end), labels = of_rank[key]
            assert labels == list(range(first, end)), key
        rows = WHOLE[key[1].rpartition(".")[0]]
        assert {row for of_rank in told for row in range(*of_rank[key][0])} == set(range(rows)), key
