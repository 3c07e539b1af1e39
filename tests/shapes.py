"""Decoder shapes small enough for tests, keyed weights for them, and batches of random tokens."""

from dataclasses import fields, replace

import torch

from dynatrain.models.decoder import canonical_name
from dynatrain.models.initial import initial_box, initial_rule
from dynatrain.space.blocks import Experts, Latent
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


MIXTRAL = Experts(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=96)
QWEN3_MOE = Experts(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, norm_topk_prob=False)
DEEPSEEK = Experts(
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    gate="sigmoid",
    routed_scaling_factor=2.5,
    n_shared_experts=2,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
)
LATENT = Latent(q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)


def experts_shape(experts, **changes):
    """A decoder with these experts in both layers."""
    return small_shape(experts=experts, **changes)


def latent_shape(latent=LATENT, **changes):
    """A decoder in DeepSeek-V3's form: one dense layer, two with experts, latent attention; or one near it."""
    names = {field.name for field in fields(Experts)} & changes.keys()
    experts = replace(DEEPSEEK, **{name: changes.pop(name) for name in names})
    sizes = {"num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": latent.head_dim}
    return small_shape(experts=experts, latent=latent, **sizes | changes)


def fill(part, seed):
    """Give every parameter and buffer of a part its keyed initial value, and tie what is tied."""
    with torch.no_grad():
        for name, value in (*part.named_parameters(), *part.named_buffers()):
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
