"""Hugging Face's ``config.json`` as far as it describes a decoder that can be built: read, judged, written.

A value of a wrong kind, a missing one, or a feature that is not built is refused by its name: a model that silently
lacks a bias or a rope scaling would train, and be another model.
"""

from pathlib import Path

from dynatrain.observe.fields import shown
from dynatrain.observe.objects import ObjectError, read_object
from dynatrain.space.hf_architectures import (
    ARCHITECTURES,
    HEADS,
    SIZES,
    SIZES_OF_EXPERTS,
    SIZES_OF_LATENTS,
    Architecture,
    Config,
)


class ModelError(ValueError):
    """A model that cannot be built or found.

    Attributes:
        problems: everything that is wrong, one sentence each.
    """

    def __init__(self, what: str, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__("\n".join((what, *(f"  - {problem}" for problem in problems))))


_OF_KIND: dict[str, tuple[type, ...]] = {
    **dict.fromkeys((*SIZES, *HEADS, "max_position_embeddings"), (int,)),
    **dict.fromkeys((*SIZES_OF_EXPERTS, *SIZES_OF_LATENTS), (int,)),
    **dict.fromkeys(("experts.n_shared_experts", "experts.first_k_dense_replace"), (int,)),
    **dict.fromkeys(("experts.n_group", "experts.topk_group"), (int,)),
    **dict.fromkeys(("norm_eps", "rope_theta", "dropout", "attention_dropout"), (int, float)),
    **dict.fromkeys(("experts.routed_scaling_factor", "experts.router_aux_loss_coef"), (int, float)),
    **dict.fromkeys(("tie_word_embeddings", "experts.norm_topk_prob"), (bool,)),
}

_MOST = {"num_hidden_layers": 4096, "experts.num_experts": 65536}
_MOST_OF_ANY = 1 << 31
"""Above every model there is; a tensor of more is beyond any machine, and its sizes beyond arrays of numbers."""


def read_json(path: Path) -> Config:
    """The parsed file.

    Raises:
        ModelError: where it cannot be read or is not a JSON object.
    """
    try:
        return read_object(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read", (error.strerror or str(error),)) from None
    except ObjectError as error:
        raise ModelError(f"{path} is not a model's config", (str(error),)) from None


def decoder_fields(config: Config, *, to_train: bool) -> Config:
    """The fields of a ``DecoderShape``, from a parsed ``config.json``.

    Raises:
        ModelError: with everything that is missing, of a wrong kind, or not built.
    """
    # A null says no more than a key that is not there.
    given = {key: value for key, value in config.items() if value is not None}
    architecture = _architecture(given)
    given = {key: given[other] for other, key in architecture.also.items() if other in given} | given
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
    if "latent.kv_lora_rank" in values:
        by_size["head_dim"] = values["latent.qk_nope_head_dim"] + values["latent.qk_rope_head_dim"]
    return by_size | architecture.defaults | values | architecture.fixed


def written_config(fields: Config) -> Config:
    """The ``config.json`` of a ``DecoderShape``'s fields: what :func:`decoder_fields` reads.

    Raises:
        ModelError: no architecture has this combination.
    """
    architecture = architecture_of(fields)
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
        **architecture.only,
        **architecture.said,
    }


def architecture_of(fields: Config) -> Architecture:
    """The architecture that has a decoder of these fields.

    Raises:
        ModelError: none has.
    """
    for one in ARCHITECTURES:
        if one.fixed.items() <= fields.items() and one.keys.keys() <= fields.keys():
            values = {key: fields[field] for field, key in one.keys.items()}
            if all(fields[field] == values[key] for field, key in one.keys.items()):  # two fields may have one key
                return one
    rule = f"built are those of {', '.join(one.name for one in ARCHITECTURES)}, each with its own kind of experts"
    raise ModelError("Hugging Face has no architecture for this combination of attention, MLP and experts", (rule,))


def _architecture(given: Config) -> Architecture:
    named = given.get("architectures", [])
    found = {one.name: one for one in ARCHITECTURES}
    if isinstance(named, list) and len(named) == 1 and named[0] in found:
        return found[named[0]]
    raise ModelError("this architecture is not built", (f"architectures is {named!r}; built are {', '.join(found)}",))


def _of_wrong_kind(values: Config, keys: dict[str, str]) -> list[str]:
    # To Python a truth value is an int; to a reader of a config it is not.
    wrong = [
        field
        for field, value in values.items()
        if not isinstance(value, _OF_KIND[field]) or (isinstance(value, bool) and bool not in _OF_KIND[field])
    ]
    kinds = {field: " or ".join(kind.__name__ for kind in _OF_KIND[field]) for field in wrong}
    most = {field: _MOST.get(field, _MOST_OF_ANY) for field in values if field not in wrong}
    return [f"{keys[field]} is {shown(values[field])}; {kinds[field]} is needed" for field in wrong] + [
        f"{keys[field]} is {shown(values[field])}; at most {limit} is built"
        for field, limit in most.items()
        if not values[field] <= limit
    ]


def _changes_tensors(given: Config, architecture: Architecture) -> list[str]:
    """Features with tensors of their own, or with another meaning of those there are."""
    absent = ("attention_bias", "mlp_bias", "add_cross_attention")
    found = [f"{key} is not built; only false" for key in absent if given.get(key)]
    key, built = architecture.activation
    if given.get(key, built[0]) not in built:
        found.append(f"{key} {given[key]!r} is not built; only {' or '.join(map(repr, built))}")
    found += [
        f"{key} {given[key]!r} is not built; only {built!r}"
        for key, built in architecture.only.items()
        if given.get(key, built) != built
    ]
    return found


def _changes_computation(given: Config, architecture: Architecture) -> list[str]:
    """Features that leave every tensor as it is, but for how files have it."""
    found = []
    if "quantization_config" in given:
        found.append("quantization_config is not built; only weights as they are")
    for key in ("rope_scaling", "rope_parameters"):
        rope = given.get(key, {})
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        if kind != "default":
            found.append(f"{key} of type {kind!r} is not built; only plain rotary embedding")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        found.append(f"partial_rotary_factor {given['partial_rotary_factor']} is not built; only 1")
    found += [
        f"{key} is not built; only false"
        for key in ("use_sliding_window", "scale_attn_by_inverse_layer_idx", "router_jitter_noise")
        if given.get(key)
    ]
    if architecture.model_type == "mixtral" and "sliding_window" in given:
        found.append(f"sliding_window {given['sliding_window']} is not built; only null")
    if not given.get("rope_interleave", True):
        found.append("rope_interleave false is not built; only true")
    if not given.get("scale_attn_weights", True):
        found.append("scale_attn_weights false is not built; only true")
    if architecture.model_type == "gpt2":
        usual = architecture.defaults["dropout"]
        embedding, residual = (given.get(key, usual) for key in ("embd_pdrop", "resid_pdrop"))
        if embedding != residual:
            found.append(f"embd_pdrop {embedding} beside resid_pdrop {residual} is not built; only equal ones")
    return found
