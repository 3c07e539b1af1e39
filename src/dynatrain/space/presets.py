"""Models by name: ours, sized for tests and benchmarks, and the published shapes that people compare with."""

import difflib
from dataclasses import replace

from dynatrain.observe.paths import exists, user_path
from dynatrain.space.blocks import SIGMOID, Experts, Latent
from dynatrain.space.decoder import DecoderShape
from dynatrain.space.hf_config import ModelError


def _llama_3_1(hidden_size: int, intermediate_size: int, num_hidden_layers: int, num_heads: int) -> DecoderShape:
    return DecoderShape(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        rope_theta=500000.0,
        max_position_embeddings=131072,
    )


def _qwen3_moe(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, width: int) -> DecoderShape:
    return DecoderShape(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        norm_eps=1e-6,
        rope_theta=1000000.0,
        qk_norm=True,
        max_position_embeddings=40960,
        experts=Experts(
            num_experts=128, num_experts_per_tok=8, moe_intermediate_size=width, router_aux_loss_coef=0.001
        ),
    )


def _deepseek_v3(num_heads: int, vocab_size: int, rope_theta: float, longest: int, experts: Experts) -> DecoderShape:
    return DecoderShape(
        hidden_size=7168,
        intermediate_size=18432,
        num_hidden_layers=61,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=192,
        vocab_size=vocab_size,
        norm_eps=1e-6,
        rope_theta=rope_theta,
        max_position_embeddings=longest,
        experts=experts,
        latent=Latent(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    )


_V3_EXPERTS = Experts(
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    gate=SIGMOID,
    routed_scaling_factor=2.5,
    n_shared_experts=1,
    first_k_dense_replace=3,
    n_group=8,
    topk_group=4,
    router_aux_loss_coef=0.001,
)
_K2_EXPERTS = replace(
    _V3_EXPERTS, num_experts=384, routed_scaling_factor=2.827, first_k_dense_replace=1, n_group=1, topk_group=1
)

PRESETS = {
    "tiny": DecoderShape(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        vocab_size=4096,
    ),
    "25m": DecoderShape(
        hidden_size=384,
        intermediate_size=1200,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=48,
        vocab_size=4096,
    ),
    "200m": DecoderShape(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=24,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=32768,
    ),
    "600m": DecoderShape(
        hidden_size=1280,
        intermediate_size=2944,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=80,
        vocab_size=32768,
    ),
    "gpt2": DecoderShape(
        family="gpt2",
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        vocab_size=50257,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    ),
    "llama-3.1-8b": _llama_3_1(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama_3_1(8192, 28672, 80, 64),
    "llama-3.1-405b": _llama_3_1(16384, 53248, 126, 128),
    "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 48, 32, 768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 12288, 94, 64, 1536),
    "deepseek-v3": _deepseek_v3(128, 129280, 10000.0, 163840, _V3_EXPERTS),
    "kimi-k2": _deepseek_v3(64, 163840, 50000.0, 131072, _K2_EXPERTS),
}
"""Shapes by name. A published shape is its sizes: a preset trains with plain rotary embedding."""


def resolve_model(text: str, *, to_train: bool = False) -> DecoderShape:
    """The shape that ``text`` names: a preset, a folder with a ``config.json``, or such a file.

    Args:
        text: what the user wrote.
        to_train: also refuse features that a model that is to be computed would need (see ``DecoderShape``).

    Raises:
        ModelError: for an unknown name, with the nearest ones, and for a config that cannot be used.
    """
    if text in PRESETS:
        return PRESETS[text]
    path = user_path(text)
    if exists(path):
        return DecoderShape.read_config(path, to_train=to_train)
    near = difflib.get_close_matches(text.lower(), PRESETS, n=2, cutoff=0.4)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    rule = f"a model is a preset ({', '.join(PRESETS)}), a folder with a config.json, or such a file{hint}"
    raise ModelError(f"there is no model {text!r}", (rule,))
