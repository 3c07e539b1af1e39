"""Models by name: ours, sized for tests and benchmarks, and the published shapes that people compare with."""

import difflib
from pathlib import Path

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
    path = Path(text).expanduser()
    if path.exists():
        return DecoderShape.read_config(path, to_train=to_train)
    near = difflib.get_close_matches(text.lower(), PRESETS, n=2, cutoff=0.4)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    rule = f"a model is a preset ({', '.join(PRESETS)}), a folder with a config.json, or such a file{hint}"
    raise ModelError(f"there is no model {text!r}", (rule,))
