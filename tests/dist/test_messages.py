"""What each rank sends in a step, by axis, kind and bytes; what it holds of the experts; what cp leaves of activations.

Counted from outside (``tests.ledgers``), and compared with what the algorithm of each axis says.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.backward import Backward, groups_of
from tests.jobs import SHAPE, TOKENS, Case, everywhere
from tests.ledgers import Alive, Messages
from tests.shapes import QWEN3_MOE, experts_shape, fill, random_batch, small_shape
from torch.nn import functional

from dynatrain.layout.text import parse_layout
from dynatrain.models.attend import attend_whole
from dynatrain.models.context import attend_over
from dynatrain.models.decoder import DecoderPart
from dynatrain.models.keyed import KeyedStream
from dynatrain.models.share import TokenShare
from dynatrain.train.groups import axis_members

SUMS, GATHERS, SCATTERS = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"
"""DTensor's own."""
GATHER, EXCHANGE, SEND, RECEIVE, SUM = "_allgather_base_", "alltoall_base_", "send", "recv_", "allreduce_"
ELEMENT = 8
STREAM = TOKENS * SHAPE.hidden_size * ELEMENT
"""Bytes of the residual stream of a micro-batch."""
LOGITS = TOKENS * 16 * ELEMENT
"""What a rank of tp4 sends of them: of 61 rows of vocabulary the last one has 13, and sends as many as the others."""
MOE = experts_shape(QWEN3_MOE, num_hidden_layers=4, num_key_value_heads=4)
EXPERTS = ("fsdp4.ep4", "fsdp4.ep2", "fsdp4", "tp4-sp.ep4")
PIPELINES = {
    # Messages of a rank to each neighbour for each micro-batch: outputs of its stages, and gradients of their inputs.
    "pp4": {0: {1: 1}, 1: {0: 1, 2: 1}, 2: {1: 1, 3: 1}, 3: {2: 1}},
    "pp2v2.dp2": {0: {1: 3}, 1: {0: 3}},  # stages 0 and 2, 1 and 3: three edges, each crossed in both directions
    "pp2v2-zb.dp2": {0: {1: 3}, 1: {0: 3}},
    "pp2v2-zbv.dp2": {0: {1: 2}, 1: {0: 2}},  # stages 0 and 3, 1 and 2: the middle edge stays on its rank
    "pp2.tp2-sp": {0: {1: 1}, 1: {0: 1}},
    "pp2.cp2-ring": {0: {1: 1}, 1: {0: 1}},
}
READERS = {
    "dense": SHAPE,
    "copied heads": replace(SHAPE, num_key_value_heads=2),
    "gpt2": replace(SHAPE, family="gpt2", num_key_value_heads=8),
    "shared experts": replace(MOE, experts=replace(QWEN3_MOE, n_shared_experts=2)),
}
"""Blocks of all forms, whose residual stream is read by few matrices or many."""
DENSE = ("fsdp4", "fsdp4-z2", "fsdp4-z1", "dp4", "dp2.fsdp2", "cp4", "cp4-ring", "cp4-ulysses")


def per_rank(text):
    """Micro-batches of a data rank: as few as the layout takes, but two where sums of several are to be told apart."""
    layout = parse_layout(text)
    return max(layout.size("pp"), 2 if layout.size("fsdp") > 1 else 1)


def axis_of(name, world, rank):
    """The axis whose ranks a group is of."""
    if name == dist.group.WORLD.group_name:
        return "world"
    for axis in ("pp", "dp", "fsdp", "tp"):
        if world.mesh.get_group(axis).group_name == name:
            return axis
    purpose, members = name.split(".")[2:4]
    if purpose in {"context", "heads"}:
        return "cp" if purpose == "context" else purpose
    members = [int(member) for member in members.split("_")]
    return next(axis for axis in ("efsdp", "ep", "etp") if axis_members(world.layout, axis, rank) == members)


def measured(world):
    """Of each job and layout: ``{(axis, kind): (calls, bytes)}`` of a step on this rank, and bytes of its shards."""
    groups, found = groups_of(world), {}
    cases = [(False, SHAPE, text) for text in (*DENSE, *PIPELINES)] + [(True, MOE, text) for text in EXPERTS]
    cases += [(name, shape, text) for name, shape in READERS.items() for text in ("tp4", "tp4-sp")]
    for key, shape, text in cases:
        micro = per_rank(text) * parse_layout(text).data_ranks
        backward = Backward(groups, Case(tour=(), shape=shape, micro_batches=micro), text)
        if "pp" in text:
            backward.run()  # torch tells stages' shapes from rank to rank, once
        with Messages() as seen:
            backward.run()
        sent = {
            (axis_of(name, backward.world, world.rank), kind): (count, seen.sent[name, kind])
            for (name, kind), count in seen.calls.items()
        }
        found[key, text] = sent, backward.stored()
    return found


@pytest.fixture(scope="module")
def found():
    return everywhere(4, measured, 200)


def by_axis(sent, axis):
    """``{kind: (calls, bytes)}`` over the ranks of one axis."""
    return {kind: counted for (of, kind), counted in sent.items() if of == axis}


def kinds(sent):
    """``{axis: kinds}``, without the one sum over all ranks that tells loss and norm."""
    assert sent.pop(("world", SUM))[0] == 1
    return {axis: {kind for of, kind in sent if of == axis} for axis, _ in sent}


KINDS = {
    "fsdp4": {"fsdp": {GATHER, EXCHANGE}},
    "dp4": {"dp": {GATHER, EXCHANGE}},
    "dp2.fsdp2": {"dp": {GATHER, EXCHANGE}, "fsdp": {GATHER, EXCHANGE}},
    "cp4": {"cp": {GATHER, EXCHANGE}, "fsdp": {GATHER, EXCHANGE}},
    "cp4-ring": {"cp": {SEND, RECEIVE}, "fsdp": {GATHER, EXCHANGE}},
    "cp4-ulysses": {"cp": {EXCHANGE}, "fsdp": {GATHER, EXCHANGE}},
}
"""A reduce-scatter is an exchange, and a sum in a fixed order of what came."""


@pytest.mark.parametrize("text", KINDS)
def test_each_axis_sends_in_its_own_ways_alone(found, text):
    for rank in found:
        sent, _ = rank[False, text]
        assert kinds(dict(sent)) == KINDS[text]


@pytest.mark.parametrize(("text", "gathers", "reductions"), [("fsdp4", 4, 2), ("fsdp4-z2", 2, 2), ("fsdp4-z1", 1, 1)])
def test_bytes_of_zeros_stages(found, text, gathers, reductions):
    """Two micro-batches a rank; ZeRO-3 gathers for the forward and again for the backward."""
    for rank in found:
        sent, stored = rank[False, text]
        shards = sum(stored.values())
        assert sent["fsdp", GATHER][1] == gathers * shards
        assert sent["fsdp", EXCHANGE][1] == reductions * 4 * shards


def test_bytes_of_attention_over_a_sequence(found):
    """Of each layer: a share of the keys and values, of the queries and results, of their gradients."""
    times, tokens = SHAPE.num_hidden_layers, TOKENS // 4
    both = 2 * tokens * SHAPE.num_key_value_heads * SHAPE.head_dim * ELEMENT
    each = tokens * SHAPE.num_attention_heads * SHAPE.head_dim * ELEMENT
    hops = 3 + 3 + 4  # forward; once more in backward, and their gradients, which come home
    for rank in found:
        ring, gather, ulysses = (by_axis(rank[False, text][0], "cp") for text in ("cp4-ring", "cp4", "cp4-ulysses"))
        assert ring[SEND] == (times * hops, times * hops * both)
        assert ring[RECEIVE][0] == times * hops
        assert gather == {GATHER: (times, times * both), EXCHANGE: (times, times * 4 * both)}
        assert ulysses == {EXCHANGE: (4 * times, times * 2 * (2 * each + both))}


@pytest.mark.parametrize("name", READERS)
def test_bytes_of_tensor_parallel_blocks(found, name):
    """Whole streams: the embedding's, of a block two, and two of gradients, by however many matrices it is read.

    With ``-sp`` a sum is scattered, and gathered before matrices read it.
    """
    streams = READERS[name].num_hidden_layers * 4 + 2  # into attention and MLP, and out; the embedding's, the head's
    for rank in found:
        plain, sp = (by_axis(rank[name, text][0], "tp") for text in ("tp4", "tp4-sp"))
        if name != "shared experts":
            assert plain == {SUMS: (streams, streams * STREAM), GATHERS: (1, LOGITS)}
        assert sp[SCATTERS] == (streams, streams * STREAM)
        assert sp[GATHERS] == (streams + 1, streams * STREAM // 4 + LOGITS)
        assert sp.keys() == {SUMS, GATHERS, SCATTERS}  # sums of gradients of norms, which each rank has of its tokens


def test_bytes_of_shared_experts_where_the_residual_stream_is_whole(found):
    """As other experts they have a slice of it: gather it and scatter their output, and so with the gradients.

    What comes out of the block, and the gradient of what goes in, is gathered, too.
    """
    layers = MOE.num_hidden_layers
    for rank in found:
        plain = by_axis(rank["shared experts", "tp4"][0], "tp")
        assert plain[SCATTERS] == (2 * layers, 2 * layers * STREAM)
        assert plain[GATHERS] == (4 * layers + 1, 4 * layers * STREAM // 4 + LOGITS)


@pytest.mark.parametrize("text", PIPELINES)
def test_bytes_between_stages(found, text):
    """Outputs go on and gradients come back, once for each micro-batch of a data rank, in every schedule."""
    layout = parse_layout(text)
    cut = layout.size("cp") * (layout.size("tp") if layout.sp else 1)
    for number, rank in enumerate(found):
        messages = sum(PIPELINES[text][layout.coordinates(number).pp].values())
        sent = by_axis(rank[False, text][0], "pp")
        assert sent == {
            SEND: (per_rank(text) * messages, per_rank(text) * messages * STREAM // cut),
            RECEIVE: (per_rank(text) * messages, 0),
        }


def test_a_rank_holds_and_gathers_its_own_experts_alone_and_rows_come_to_them(found):
    """Forward and backward gather what efsdp cuts, whatever ep has dealt out; nothing where it cuts nothing."""
    sizes = MOE.experts
    whole = MOE.num_hidden_layers * 3 * sizes.num_experts * sizes.moe_intermediate_size * MOE.hidden_size * ELEMENT
    for text, dealt, sharded in (("fsdp4.ep4", 4, 1), ("fsdp4.ep2", 2, 2), ("fsdp4", 1, 4), ("tp4-sp.ep4", 4, 1)):
        for rank in found:
            sent, stored = rank[True, text]
            resident = sum(size for name, size in stored.items() if ".experts." in name)
            assert resident == whole // dealt // sharded
            gathered = {GATHER: 2 * per_rank(text) * resident} if sharded > 1 else {}
            assert {kind: size for kind, (_, size) in by_axis(sent, "efsdp").items() if kind == GATHER} == gathered
    for text in ("fsdp4.ep4", "tp4-sp.ep4"):
        runs = per_rank(text) * MOE.num_hidden_layers
        micro = per_rank(text) * parse_layout(text).data_ranks
        rows = micro * TOKENS * sizes.num_experts_per_tok * MOE.num_hidden_layers
        exchanged = [by_axis(rank[True, text][0], "ep") for rank in found]
        # Of each block: how many rows come; the rows, there and back; and their gradients.
        assert all(of.keys() == {EXCHANGE} and of[EXCHANGE][0] == runs * 5 for of in exchanged)
        told = 4 * runs * sizes.num_experts * 8
        assert sum(of[EXCHANGE][1] for of in exchanged) == 4 * rows * MOE.hidden_size * ELEMENT + told


def activations(share, attend):
    """Bytes that a forward leaves for its backward, and the most that is alive at once; no parameters, no gradients."""
    shape = small_shape(num_hidden_layers=2, max_position_embeddings=512, dropout=0.0)
    part = DecoderPart(shape, range(2), first=True, last=True, streams=KeyedStream(seed=1, share=share), attend=attend)
    fill(part, 1)
    for param in part.parameters():
        param.grad = torch.zeros_like(param)
    fixed = [tensor for param in part.parameters() for tensor in (param, param.grad)]
    ((samples, inputs, targets),) = random_batch(shape, 0, micro_batches=1, samples=1, tokens=512)
    inputs, targets = share.of(inputs), share.of(targets)
    with Alive(fixed) as alive:
        out = part(inputs, samples)
        loss = functional.cross_entropy(out.flatten(0, 1), targets.flatten(), reduction="sum")
        left = alive.held()
        loss.backward()
    without = sum(tensor.nbytes for tensor in fixed)
    return left - without, alive.peak - without


def test_activations_fall_as_the_ranks_of_a_sequence_grow():
    def work(world):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        found = {1: activations(TokenShare(), attend_whole)}
        for ways, group in ((2, pairs[world.rank // 2]), (4, dist.group.WORLD)):
            share = TokenShare(parts=ways, part=group.rank())
            for way in ("ring", "gather", "ulysses"):
                found[way, ways] = activations(share, attend_over(way, share, group))
        return found

    for found in everywhere(4, work, 60):
        alone = found[1]
        for way in ("ring", "gather", "ulysses"):
            for one, two, four in zip(alone, found[way, 2], found[way, 4], strict=True):
                assert four < two < one
                assert two <= 0.75 * one
                assert four <= 0.42 * one
        keys_and_values = 2 * 2 * 512 * 2 * 16 * 4  # of two layers, all tokens, two heads
        for ways in (2, 4):
            assert found["gather", ways][0] - found["ring", ways][0] >= keys_and_values * (ways - 1) // ways
        assert found["ring", 4][0] <= 0.3 * alone[0]
