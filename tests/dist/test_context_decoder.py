"""A decoder part that holds a share of the tokens computes what it computes alone: places, drops and documents too."""

from functools import partial

import torch
import torch.distributed as dist
from tests.dist.foreign import everywhere, whole
from tests.shapes import fill, random_batch, small_shape
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dynatrain.layout.text import parse_layout
from dynatrain.models.attend import attend_whole
from dynatrain.models.context import WAYS, attend_over
from dynatrain.models.decoder import DecoderPart
from dynatrain.models.keyed import KeyedStream
from dynatrain.models.share import TokenShare
from dynatrain.train.parallel import tensor_plan

SHAPES = {
    "rotary": small_shape(qk_norm=True, tie_word_embeddings=True, dropout=0.2, vocab_size=62),
    "learned": small_shape(family="gpt2", num_key_value_heads=4, dropout=0.2, attention_dropout=0.3, vocab_size=62),
}
TOKENS = 32
STARTS = torch.tensor([[0] * 5 + [5] + [6] * 17 + [23] * 9, [0] * 32])


def decoder(shape, share, attend, head_part=0):
    streams = KeyedStream(seed=5, step=3, share=share, head_part=head_part)
    part = DecoderPart(shape, range(2), first=True, last=True, streams=streams, attend=attend).double()
    fill(part, 5)
    return part


def learn(part, shape, share, documents):
    """Logits of the share's tokens; the part has the gradients of its share of the mean loss."""
    ((samples, inputs, targets),) = random_batch(shape, 0, micro_batches=1, samples=2, tokens=TOKENS)
    out = part(share.of(inputs), samples, documents=documents)
    loss = functional.cross_entropy(out.flatten(0, 1), share.of(targets).flatten(), reduction="sum")
    (loss / targets.numel()).backward()
    return out.detach()


def alone(shape, documents):
    part = decoder(shape, TokenShare(), attend_whole)
    return learn(part, shape, TokenShare(), documents), {n: p.grad for n, p in part.named_parameters()}


def distances(part, shape, share, group, documents, expected):
    """Largest differences of logits and, summed over the group, of gradients."""
    out = learn(part, shape, share, documents)
    apart = {"logits": (out - share.of(expected[0])).abs().max().item()}
    for name, param in part.named_parameters():
        grad = whole(param.grad).contiguous()
        dist.all_reduce(grad, group=group)
        apart[name] = (grad - expected[1][name]).abs().max().item()
    return apart


def test_four_ranks_with_a_share_of_the_tokens_each_are_one():
    expected = {(name, packed): alone(shape, STARTS if packed else None)
                for name, shape in SHAPES.items() for packed in (False, True)}  # fmt: skip

    def work(world):
        share, group = TokenShare(parts=4, part=world.rank), dist.group.WORLD
        found = {}
        for (name, packed), want in expected.items():
            for way in WAYS:
                part = decoder(SHAPES[name], share, attend_over(way, share, group))
                apart = distances(part, SHAPES[name], share, group, STARTS if packed else None, want)
                found[name, packed, way] = max(apart.values())
        return found

    for found in everywhere(4, work):
        assert max(found.values()) < 1e-12, found


def test_sequence_parallel_ranks_cut_the_heads_and_the_residual_stream_of_a_share():
    """With attention computed anew in the backward pass, where its messages are sent once more."""
    expected, layout = {name: alone(shape, STARTS) for name, shape in SHAPES.items()}, parse_layout("tp2-sp")

    def work(_):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        part, slice_, group = mesh.get_local_rank("cp"), mesh.get_local_rank("tp"), mesh.get_group("cp")
        share = TokenShare(parts=2, part=part, slices=2, slice=slice_)
        found = {}
        for (name, shape), way in zip(SHAPES.items(), ("ring", "ulysses"), strict=True):
            model = decoder(shape, share, attend_over(way, share, group), head_part=slice_)
            for layer in model.layers.values():
                layer.self_attn.forward = partial(checkpoint, layer.self_attn.forward, use_reentrant=False)
            parallelize_module(model, mesh["tp"], tensor_plan(model, layout))
            model.tie()
            found[name, way] = max(distances(model, shape, share, group, STARTS, expected[name]).values())
        return found

    for found in everywhere(4, work):
        assert max(found.values()) < 1e-12, found
