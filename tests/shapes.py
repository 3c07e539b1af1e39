"""Decoder shapes small enough for tests, keyed weights for them, and batches of random tokens."""

from dataclasses import dataclass

import torch

from dynatrain.models.decoder import canonical_name
from dynatrain.models.initial import initial_box, initial_rule
from dynatrain.space.box import whole

torch.set_num_threads(1)  # tests fork: a thread pool of torch does not survive it, and two cores are shared


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The smallest decoder with every part in use."""

    hidden_size: int = 64
    intermediate_size: int = 96
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 61
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    qk_norm: bool = False
    max_position_embeddings: int = 64
    dropout: float = 0.1


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
