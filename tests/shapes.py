"""Decoder shapes small enough for tests, keyed weights for them, and batches of random tokens."""

from dataclasses import replace

import torch

from dynatrain.models.decoder import canonical_name
from dynatrain.models.initial import initial_box, initial_rule
from dynatrain.space.box import whole
from dynatrain.space.decoder import DecoderShape

torch.set_num_threads(1)  # tests fork: a thread pool of torch does not survive it, and two cores are shared


_SMALL = DecoderShape(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=61,
    max_position_embeddings=64,
    dropout=0.1,
)


def small_shape(**changes):
    """A decoder of two layers with grouped keys and dropout, or another near it."""
    return replace(_SMALL, **changes)


def fill(part, seed):
    """Give every parameter of a part its keyed initial value, and tie what is tied."""
    with torch.no_grad():
        for name, value in part.named_parameters():
            logical = canonical_name(part, name)
            shape = tuple(value.shape)
            rule = initial_rule(logical, part.shape)
            value.copy_(initial_box(seed, logical, shape, whole(shape), rule=rule, dtype=value.dtype))


def random_batch(shape, step, *, micro_batches, samples, tokens):
    """One step's micro-batches ``(samples, inputs, targets)``, other numbers at each step."""
    generator = torch.Generator().manual_seed(step)
    windows = torch.randint(shape.vocab_size, (micro_batches, samples, tokens + 1), generator=generator)
    numbers = torch.randint(1 << 30, (micro_batches, samples), generator=generator)
    return [(n, w[:, :-1], w[:, 1:]) for n, w in zip(numbers, windows, strict=True)]
