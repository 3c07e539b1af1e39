"""The decoder part against the plain-torch oracle."""

import math
from dataclasses import replace

import pytest
import torch
from tests import oracle
from tests.shapes import fill, random_batch, small_shape
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional

from dynatrain.models.decoder import DecoderPart, canonical_name
from dynatrain.models.keyed import KeyedStream
from dynatrain.space.decoder import catalogue
from dynatrain.train.optimizer import OptimizerSettings, adamw

SHAPES = {
    "untied": small_shape(),
    "tied": small_shape(tie_word_embeddings=True),
    "qk_norm": small_shape(qk_norm=True, tie_word_embeddings=True, rope_theta=1e6),
    "every head its own keys": small_shape(num_key_value_heads=4, dropout=0.0),
    "gpt2, tied": small_shape(family="gpt2", num_key_value_heads=4, tie_word_embeddings=True),
    "gpt2, untied": small_shape(family="gpt2", num_key_value_heads=2, num_attention_heads=2, head_dim=32),
    "one key head": small_shape(num_key_value_heads=1, head_dim=10, hidden_size=60),
}


def whole_part(shape, *, seed=5, dtype=torch.float64):
    part = DecoderPart(shape, range(shape.num_hidden_layers), first=True, last=True, streams=KeyedStream(seed=seed)).to(
        dtype
    )
    fill(part, seed)
    return part


def weights_of(part):
    return {canonical_name(part, name): value.detach().clone() for name, value in part.named_parameters()}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_forward_has_the_bits_of_the_oracle(shape, dtype):
    part = whole_part(shape, dtype=dtype)
    part.streams.step = 3
    ((samples, inputs, _),) = random_batch(shape, 0, micro_batches=1, samples=3, tokens=32)

    assert torch.equal(part(inputs, samples), oracle.logits(weights_of(part), shape, samples, inputs, "5/3"))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_plain_training_of_a_whole_part_equals_the_oracle(shape):
    part = whole_part(shape)
    start = weights_of(part)
    batches = [random_batch(shape, step, micro_batches=3, samples=2, tokens=32) for step in range(6)]
    optimizer = adamw(part, OptimizerSettings())
    losses, rates = [], [1e-2 / 2, 1e-2, 1e-2]
    rates += [1e-2 * (0.55 + 0.45 * math.cos(math.pi * i / 4)) for i in (1, 2, 3)]
    for step, batch in enumerate(batches):
        part.streams.step = step
        loss = 0.0
        for samples, inputs, targets in batch:
            out = part(inputs, samples).flatten(0, 1)
            share = functional.cross_entropy(out, targets.flatten(), reduction="sum") / (3 * 2 * 32)
            share.backward()
            loss += share.item()
        nn.utils.clip_grad_norm_(part.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)

    expected = list(oracle.train(start, shape, batches, seed=5, rate=1e-2, warmup=2, steps=6, clip=0.5))
    _, weights, moments = expected[-1]

    assert losses == pytest.approx([loss for loss, _, _ in expected], abs=1e-12)
    for name, value in weights_of(part).items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-12)
    for name, value in part.named_parameters():
        for state in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.state[value][state], moments[name][state], rtol=0, atol=1e-12)
        # Adam moves an element by its rate each step, but a bias of keys is without effect: softmax is blind to it.
        blind = name.endswith("k_proj.bias")
        assert (value - start[name]).abs().max() > 1e-2 or blind


def test_the_oracle_sums_as_a_binary_counter_or_left_to_right():
    parts = [[torch.tensor(x, dtype=torch.float64)] for x in (1.0, 1e16, -1e16, 3.0, 0.7, 0.6, 0.5)]

    assert oracle.total(parts, tree=True)[0] == ((1.0 + 1e16) + (-1e16 + 3.0)) + ((0.7 + 0.6) + 0.5)
    assert oracle.total(parts, tree=False)[0] == (((((1.0 + 1e16) - 1e16) + 3.0) + 0.7) + 0.6) + 0.5
    assert oracle.total(parts, tree=True)[0] != oracle.total(parts, tree=False)[0]


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_parts_in_a_row_are_the_whole(cut):
    shape = small_shape(num_hidden_layers=3, tie_word_embeddings=True)
    whole = whole_part(shape)
    head = DecoderPart(shape, range(cut), first=True, last=False, streams=KeyedStream(seed=5)).double()
    tail = DecoderPart(shape, range(cut, 3), first=False, last=True, streams=KeyedStream(seed=5)).double()
    for part in (head, tail):
        fill(part, 5)
    ((samples, inputs, _),) = random_batch(shape, 0, micro_batches=1, samples=2, tokens=16)

    assert torch.equal(tail(head(inputs, samples), samples), whole(inputs, samples))
    assert {canonical_name(part, n) for part in (head, tail) for n, _ in part.named_parameters()} == set(
        weights_of(whole)
    )


def test_names_are_the_published_ones_with_global_layer_numbers():
    shape = small_shape(num_hidden_layers=8, qk_norm=True)
    part = DecoderPart(shape, range(3, 4), first=False, last=True, streams=KeyedStream(seed=0))

    attention = [f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    others = ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]
    norms = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    expected = {f"layers.3.{name}" for name in attention + others + norms} | {"norm.weight", "lm_head.weight"}
    assert {name for name, _ in part.named_parameters()} == expected


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_whole_part_has_the_tensors_of_the_catalogue_in_its_order(shape):
    part = whole_part(shape)

    assert [(name, tuple(value.shape)) for name, value in part.named_parameters()] == [
        (tensor.name, tensor.shape) for tensor in catalogue(shape)
    ]


@pytest.mark.parametrize("inner", [False, True])
def test_wrappers_leave_canonical_names_alone_in_either_nesting(inner):
    shape = small_shape()
    part = DecoderPart(shape, range(2), first=True, last=True, streams=KeyedStream(seed=0))
    before = [name for name, _ in part.named_parameters()]
    layer = part.layers["1"]
    part.layers["1"] = checkpoint_wrapper(torch.compile(layer)) if inner else torch.compile(checkpoint_wrapper(layer))

    after = [name for name, _ in part.named_parameters()]
    assert after != before
    assert [canonical_name(part, name) for name in after] == before


def test_a_tied_head_is_the_embedding_and_alone_goes_by_its_name():
    shape = small_shape(tie_word_embeddings=True)
    streams = KeyedStream(seed=0)
    with torch.device("meta"):
        both = DecoderPart(shape, range(2), first=True, last=True, streams=streams)
        alone = DecoderPart(shape, range(1, 2), first=False, last=True, streams=streams)

    assert both.to(torch.float64).lm_head.weight is both.embed_tokens.weight
    assert canonical_name(alone, "lm_head.weight") == "embed_tokens.weight"
    assert "lm_head.weight" in dict(alone.named_parameters())
    both.to_empty(device="cpu")
    both.tie()
    assert both.lm_head.weight is both.embed_tokens.weight


def test_bf16_runs_forward_and_backward_and_rounds_rotation_last():
    shape = small_shape(qk_norm=True)
    part = whole_part(shape, dtype=torch.bfloat16)
    exact = whole_part(shape, dtype=torch.float32)
    ((samples, inputs, targets),) = random_batch(shape, 0, micro_batches=1, samples=2, tokens=32)
    out = part(inputs, samples)
    functional.cross_entropy(out.flatten(0, 1).float(), targets.flatten()).backward()

    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), exact(inputs, samples), rtol=0, atol=0.02)
    assert all(value.grad.isfinite().all() for value in part.parameters())
    rotary = part.layers["0"].self_attn.rotary
    x = torch.randn(1, 64, 2, 16)
    assert torch.equal(rotary(x.bfloat16()), rotary(x.bfloat16().float()).bfloat16())


def test_validation_in_inference_mode_does_not_spoil_the_next_step():
    shape = small_shape()
    part = whole_part(shape)
    ((samples, inputs, _),) = random_batch(shape, 0, micro_batches=1, samples=2, tokens=32)
    with torch.inference_mode():
        part.eval()(inputs, samples)

    part.train()(inputs, samples).sum().backward()


def test_a_part_on_meta_gives_shapes_without_memory():
    shape = small_shape()
    with torch.device("meta"):
        part = DecoderPart(shape, range(2), first=True, last=True, streams=KeyedStream(seed=0))
        tokens, samples = torch.zeros(2, 32, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)

    assert part(tokens, samples).shape == (2, 32, shape.vocab_size)


STARTS = torch.tensor([[0] * 5 + [5] + [6] * 17 + [23] * 9, [0] * 32])
"""Four documents in the first sample, one in the second."""


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_packed_document_has_the_logits_that_it_has_alone(shape):
    shape = replace(shape, dropout=0.0)  # whose masks are keyed by the place in the sample
    part = whole_part(shape)
    ((samples, inputs, _),) = random_batch(shape, 0, micro_batches=1, samples=2, tokens=32)
    out = part(inputs, samples, documents=STARTS)

    for sample, first, end in ((0, 0, 5), (0, 5, 6), (0, 6, 23), (0, 23, 32), (1, 0, 32)):
        alone = oracle.logits(weights_of(part), shape, samples[:1], inputs[sample : sample + 1, first:end], "")
        torch.testing.assert_close(out[sample : sample + 1, first:end], alone, rtol=0, atol=1e-12)
    assert (out - part(inputs, samples)).abs()[0, 5:].amin(-1).max() > 1e-4


def test_neighbours_in_the_pack_change_nothing():
    shape = small_shape()  # with dropout: a document stays at its place
    part = whole_part(shape)
    ((samples, inputs, _),) = random_batch(shape, 0, micro_batches=1, samples=2, tokens=32)
    other = inputs.clone()
    other[0, :6], other[0, 23:] = 3, 4

    before, after = (part(tokens, samples, documents=STARTS) for tokens in (inputs, other))
    assert torch.equal(before[0, 6:23], after[0, 6:23])
    assert not torch.equal(part(inputs, samples)[0, 6:23], part(other, samples)[0, 6:23])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_forward_draws_nothing_from_torchs_generator(shape):
    """Neither residual dropout nor an attention dropout of torch's own, whose masks a layout would change."""
    part, before = whole_part(replace(shape, dropout=0.3)), torch.get_rng_state()
    ((samples, inputs, _),) = random_batch(shape, 0, micro_batches=1, samples=2, tokens=32)
    out = [part(inputs, samples, documents=documents) for documents in (None, STARTS)]

    assert part.training
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(*out)
