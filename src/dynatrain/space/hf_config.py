"""Hugging Face's ``config.json`` as far as it describes a decoder that can be built: read, judged, written.

A value of a wrong kind, a missing one, or a feature that is not built is refused by its name: a model that silently
lacks a bias or a rope scaling would train, and be another model.
"""

import json
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """How the ``config.json`` of one architecture describes a decoder.

    Attributes:
        name: its entry in ``architectures``.
        model_type: Hugging Face's short name.
        fixed: fields of a ``DecoderShape`` that the architecture itself decides.
        keys: field of a ``DecoderShape`` -> its key.
        required: fields that the file must give.
        defaults: fields where the file does not say: of the architecture's own configuration class.
        activation: key of the activation, and what may stand there.
        attention_dropout: its key, and its value where the file does not say.
        said: what a written file says besides.
    """

    name: str
    model_type: str
    fixed: Config
    keys: dict[str, str]
    required: tuple[str, ...]
    defaults: Config
    activation: tuple[str, tuple[str, ...]]
    attention_dropout: tuple[str, float]
    said: Config


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_HEADS = ("num_key_value_heads", "head_dim")
_LLAMA_LIKE: Config = {
    "keys": {
        **{field: field for field in (*_SIZES, *_HEADS, "tie_word_embeddings")},
        "norm_eps": "rms_norm_eps",
        "rope_theta": "rope_theta",
        "max_position_embeddings": "max_position_embeddings",
        # Hugging Face has no residual dropout for these architectures; GPT-2's name for it is the known one.
        "dropout": "resid_pdrop",
    },
    "activation": ("hidden_act", ("silu",)),
    "attention_dropout": ("attention_dropout", 0.0),
    "said": {"attention_bias": False},
}
_LLAMA_DEFAULTS: Config = {"tie_word_embeddings": False, "norm_eps": 1e-6, "rope_theta": 10000.0, "dropout": 0.0}

ARCHITECTURES = (
    Architecture(
        name="LlamaForCausalLM",
        model_type="llama",
        fixed={"family": "llama", "qk_norm": False},
        required=_SIZES,
        defaults={**_LLAMA_DEFAULTS, "max_position_embeddings": 2048},
        **_LLAMA_LIKE,
    ),
    Architecture(
        name="Qwen3ForCausalLM",
        model_type="qwen3",
        fixed={"family": "llama", "qk_norm": True},
        required=(*_SIZES, *_HEADS),
        defaults={**_LLAMA_DEFAULTS, "max_position_embeddings": 32768},
        **_LLAMA_LIKE,
    ),
    Architecture(
        name="GPT2LMHeadModel",
        model_type="gpt2",
        fixed={"family": "gpt2", "qk_norm": False},
        keys={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "vocab_size": "vocab_size",
            "tie_word_embeddings": "tie_word_embeddings",
            "norm_eps": "layer_norm_epsilon",
            "max_position_embeddings": "n_positions",
            "dropout": "resid_pdrop",
        },
        required=("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
        defaults={"tie_word_embeddings": True, "norm_eps": 1e-5, "max_position_embeddings": 1024, "dropout": 0.1},
        activation=("activation_function", ("gelu_new", "gelu_pytorch_tanh")),
        attention_dropout=("attn_pdrop", 0.1),
        said={"attn_pdrop": 0.0},
    ),
)
"""All that are built."""

_OF_KIND: dict[str, tuple[type, ...]] = {
    **dict.fromkeys((*_SIZES, *_HEADS, "max_position_embeddings"), (int,)),
    **dict.fromkeys(("norm_eps", "rope_theta", "dropout"), (int, float)),
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
    keys = architecture.keys
    values = {field: given[key] for field, key in keys.items() if key in given}
    rope = given.get("rope_parameters", {})
    if "rope_theta" in keys and isinstance(rope, dict) and "rope_theta" in rope:
        values["rope_theta"] = rope["rope_theta"]
    problems = [f"{keys[field]} is missing" for field in architecture.required if field not in values]
    problems += _of_wrong_kind(values, keys)
    problems += _changes_tensors(given, architecture)
    if to_train:
        problems += _changes_computation(given, architecture)
    if problems:
        raise ModelError(f"this {architecture.name} config cannot be used", tuple(problems))
    width, heads = values["hidden_size"], values["num_attention_heads"]
    by_size = {
        "intermediate_size": 4 * width,
        "num_key_value_heads": heads,
        "head_dim": width // max(heads, 1),
    }
    return by_size | architecture.defaults | values | architecture.fixed


def written_config(fields: Config) -> Config:
    """The ``config.json`` of a ``DecoderShape``'s fields: what :func:`decoder_fields` reads."""
    architecture = next(one for one in ARCHITECTURES if one.fixed.items() <= fields.items())
    values = {key: fields[field] for field, key in architecture.keys.items()}
    if architecture.model_type == "gpt2":
        values["embd_pdrop"] = fields["dropout"]
    elif not fields["dropout"]:
        del values["resid_pdrop"]
    activation, (usual, *_) = architecture.activation
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        **values,
        activation: usual,
        **architecture.said,
    }


def _architecture(given: Config) -> Architecture:
    named = given.get("architectures", [])
    found = {one.name: one for one in ARCHITECTURES}
    if isinstance(named, list) and len(named) == 1 and named[0] in found:
        return found[named[0]]
    raise ModelError("this architecture is not built", (f"architectures is {named!r}; built are {', '.join(found)}",))


def _of_wrong_kind(values: Config, keys: dict[str, str]) -> list[str]:
    # To Python a truth value is an int; to a reader of a config it is not.
    return [
        f"{keys[field]} is {value!r}; {' or '.join(kind.__name__ for kind in _OF_KIND[field])} is needed"
        for field, value in values.items()
        if not isinstance(value, _OF_KIND[field]) or (isinstance(value, bool) and bool not in _OF_KIND[field])
    ]


def _changes_tensors(given: Config, architecture: Architecture) -> list[str]:
    """Features with tensors of their own, or with another meaning of those there are."""
    absent = ("attention_bias", "mlp_bias", "add_cross_attention")
    found = [f"{key} is not built; only false" for key in absent if given.get(key)]
    key, built = architecture.activation
    if given.get(key, built[0]) not in built:
        found.append(f"{key} {given[key]!r} is not built; only {' or '.join(map(repr, built))}")
    if "quantization_config" in given:
        found.append("quantization_config is not built; only weights as they are")
    return found


def _changes_computation(given: Config, architecture: Architecture) -> list[str]:
    """Features that leave every tensor as it is."""
    found = []
    for key in ("rope_scaling", "rope_parameters"):
        rope = given.get(key, {})
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        if kind != "default":
            found.append(f"{key} of type {kind!r} is not built; only plain rotary embedding")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        found.append(f"partial_rotary_factor {given['partial_rotary_factor']} is not built; only 1")
    found += [
        f"{key} is not built; only false"
        for key in ("use_sliding_window", "scale_attn_by_inverse_layer_idx")
        if given.get(key)
    ]
    if not given.get("scale_attn_weights", True):
        found.append("scale_attn_weights false is not built; only true")
    key, usual = architecture.attention_dropout
    if dropped := given.get(key, usual):
        found.append(f"{key} {dropped} is not built; only 0, which config.json has to say")
    if architecture.model_type == "gpt2":
        usual = architecture.defaults["dropout"]
        embedding, residual = (given.get(key, usual) for key in ("embd_pdrop", "resid_pdrop"))
        if embedding != residual:
            found.append(f"embd_pdrop {embedding} beside resid_pdrop {residual} is not built; only equal ones")
    return found
