"""Hugging Face's ``config.json`` as far as it describes a decoder that can be built: read, judged, written.

A value of a wrong kind, a missing one, or a feature that is not built is refused by its name: a model that silently
lacks a bias or a rope scaling would train, and be another model.
"""

import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]


class ModelError(ValueError):
    """A model that cannot be built or found.

    Attributes:
        problems: everything that is wrong, one sentence each.
    """

    def __init__(self, what: str, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__("\n".join((what, *(f"  - {problem}" for problem in problems))))


LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"

_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_QWEN3_REQUIRED = (*_REQUIRED, "num_key_value_heads", "head_dim")
_POSITIONS = {LLAMA: 2048, QWEN3: 32768}
"""Longest sequence where the file does not say: the default of each architecture's own configuration class."""
_OF_KIND: dict[str, tuple[type, ...]] = {
    **dict.fromkeys((*_QWEN3_REQUIRED, "max_position_embeddings"), (int,)),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "resid_pdrop"), (int, float)),
    "tie_word_embeddings": (bool,),
}


def read_json(path: Path) -> Config:
    """The parsed file.

    Raises:
        ModelError: where it cannot be read or is not a JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read", (error.strerror or str(error),)) from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON", (str(error),)) from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a model's config", (f"a JSON object is needed, not a {type(found).__name__}",))
    return found


def decoder_fields(config: Config, *, to_train: bool) -> Config:
    """The fields of a ``DecoderShape``, from a parsed ``config.json``.

    Raises:
        ModelError: with everything that is missing, of a wrong kind, or not built.
    """
    # A null says no more than a key that is not there.
    given = {key: value for key, value in config.items() if value is not None}
    architecture = _architecture(given)
    values = {key: given[key] for key in _OF_KIND if key in given}
    rope = given.get("rope_parameters", {})
    if isinstance(rope, dict) and "rope_theta" in rope:
        values["rope_theta"] = rope["rope_theta"]
    required = _QWEN3_REQUIRED if architecture == QWEN3 else _REQUIRED
    problems = [f"{key} is missing" for key in required if key not in values]
    problems += _of_wrong_kind(values)
    problems += _changes_tensors(given)
    if to_train:
        problems += _changes_computation(given)
    if problems:
        raise ModelError(f"this {architecture} config cannot be used", tuple(problems))
    heads = values["num_attention_heads"]
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": values["hidden_size"] // max(heads, 1),
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": _POSITIONS[architecture],
        "resid_pdrop": 0.0,
    }
    fields = defaults | values
    dropout = fields.pop("resid_pdrop")
    return {**fields, "dropout": dropout, "qk_norm": architecture == QWEN3}


def written_config(fields: Config) -> Config:
    """The ``config.json`` of a ``DecoderShape``'s fields: what :func:`decoder_fields` reads."""
    kept = {key: value for key, value in fields.items() if key not in {"qk_norm", "dropout"}}
    return {
        "architectures": [QWEN3 if fields["qk_norm"] else LLAMA],
        "model_type": "qwen3" if fields["qk_norm"] else "llama",
        **kept,
        "hidden_act": "silu",
        "attention_bias": False,
        # Hugging Face has no residual dropout for these architectures; GPT-2's name for it is the known one.
        **({"resid_pdrop": fields["dropout"]} if fields["dropout"] else {}),
    }


def _architecture(given: Config) -> str:
    named = given.get("architectures", [])
    if isinstance(named, list) and len(named) == 1 and named[0] in _POSITIONS:
        return str(named[0])
    built = " and ".join(_POSITIONS)
    raise ModelError("this architecture is not built", (f"architectures is {named!r}; built are {built}",))


def _of_wrong_kind(values: Config) -> list[str]:
    # To Python a truth value is an int; to a reader of a config it is not.
    return [
        f"{key} is {value!r}; {' or '.join(kind.__name__ for kind in _OF_KIND[key])} is needed"
        for key, value in values.items()
        if not isinstance(value, _OF_KIND[key]) or (isinstance(value, bool) and bool not in _OF_KIND[key])
    ]


def _changes_tensors(given: Config) -> list[str]:
    """Features with tensors of their own, or with another meaning of those there are."""
    found = [f"{key} is not built; only false" for key in ("attention_bias", "mlp_bias") if given.get(key)]
    if given.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act {given['hidden_act']!r} is not built; only 'silu'")
    if "quantization_config" in given:
        found.append("quantization_config is not built; only weights as they are")
    return found


def _changes_computation(given: Config) -> list[str]:
    """Features that leave every tensor as it is."""
    found = []
    for key in ("rope_scaling", "rope_parameters"):
        rope = given.get(key, {})
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        if kind != "default":
            found.append(f"{key} of type {kind!r} is not built; only plain rotary embedding")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        found.append(f"partial_rotary_factor {given['partial_rotary_factor']} is not built; only 1")
    if given.get("use_sliding_window"):
        found.append("use_sliding_window is not built; only false")
    if given.get("attention_dropout"):
        found.append(f"attention_dropout {given['attention_dropout']} is not built; only 0")
    return found
