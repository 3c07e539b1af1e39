"""The decoder-only transformer: its shape as a value, and the logical tensors that a model of that shape has.

Names are Hugging Face's for Llama without the leading ``model.``, in every family; a linear layer's weight is
``[out, in]``. Legend of the dims: D hidden size, F intermediate size, H query heads, K key/value heads, d size of one
head, V vocabulary, P positions.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dynatrain.layout.legality import ModelLimits
from dynatrain.space.blocks import COLUMNS, ROWS, SHARDED, Experts, Latent, Parameters, gated_mlp
from dynatrain.space.hf_config import ModelError, decoder_fields, read_json, written_config
from dynatrain.space.optimizers import OPTIMIZERS, beside
from dynatrain.space.tensor import FIRST, ITEMSIZE, LAST, Catalogue, Cuts, State, Tensor

LLAMA, GPT2 = FAMILIES = ("llama", "gpt2")
"""Families of decoders: see :class:`DecoderShape`."""

_NESTED = {"experts": Experts, "latent": Latent}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    """Sizes and options of a decoder, checked when made.

    Attributes:
        hidden_size: width of the residual stream.
        intermediate_size: width between the two halves of the MLP, where that has no experts.
        num_hidden_layers: transformer blocks.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads; divides the query heads.
        head_dim: elements of one query or key head; even where rotary embedding turns all of it in pairs.
        vocab_size: rows of the embedding and of the head.
        tie_word_embeddings: embedding and head are one tensor.
        norm_eps: added to the mean square (``gpt2``: the variance) under the root.
        rope_theta: base of the rotary wavelengths; ``gpt2`` has none.
        qk_norm: RMS norm over each query and key head.
        max_position_embeddings: longest sequence, in tokens.
        dropout: probability with which an element that enters the residual stream is dropped.
        attention_dropout: probability with which a probability of attention is dropped.
        family: ``llama``: RMS norms, rotary embedding, SwiGLU, no biases (Qwen3 too, with ``qk_norm``); ``gpt2``: layer
            norms, learned positions, GELU by its tanh formula, a bias in every norm and linear layer but the head.
        experts: what stands in place of the MLP (``llama``); None for a dense model.
        latent: what stands in place of grouped-query attention (``llama``); None for that.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    qk_norm: bool = False
    max_position_embeddings: int = 2048
    dropout: float = 0.0
    attention_dropout: float = 0.0
    family: str = LLAMA
    experts: Experts | None = None
    latent: Latent | None = None

    def __post_init__(self) -> None:
        problems = [f"{name} is {getattr(self, name)}; at least 1" for name in _SIZES if getattr(self, name) < 1]
        if self.num_key_value_heads > 0 and self.num_attention_heads % self.num_key_value_heads:
            pair = f"{self.num_key_value_heads} do not divide {self.num_attention_heads}"
            problems.append(f"num_key_value_heads must divide num_attention_heads: {pair}")
        problems += self._family_problems() + self._block_problems()
        problems += [f"{name} is {getattr(self, name)}; above 0" for name in _REALS if not getattr(self, name) > 0]
        problems += [
            f"{name} is {getattr(self, name)}; from 0 up to, but not, 1"
            for name in ("dropout", "attention_dropout")
            if not 0 <= getattr(self, name) < 1
        ]
        if problems:
            raise ModelError("a decoder of this shape cannot be built", tuple(problems))

    def _family_problems(self) -> list[str]:
        if self.family not in FAMILIES:
            return [f"family is {self.family!r}; one of {', '.join(FAMILIES)}"]
        if self.family == LLAMA:
            odd = self.head_dim % 2 and self.latent is None
            return [f"head_dim is {self.head_dim}; rotary embedding needs an even number"] if odd else []
        found = ["qk_norm is true; gpt2 has no norms of heads"] if self.qk_norm else []
        if self.num_key_value_heads != self.num_attention_heads:
            pair = f"{self.num_key_value_heads} for {self.num_attention_heads} heads"
            found.append(f"num_key_value_heads is {pair}; gpt2 has a key/value head for each")
        if self.num_attention_heads * self.head_dim != self.hidden_size:
            wide = f"{self.num_attention_heads} heads of {self.head_dim}"
            found.append(f"hidden_size is {self.hidden_size}; gpt2 needs the width of its heads, {wide}")
        if self.experts or self.latent:
            found.append("gpt2 has one MLP and plain attention, no experts and no latent")
        return found

    def _block_problems(self) -> list[str]:
        found = self.experts.problems() if self.experts else []
        if self.experts and not self.experts.first_k_dense_replace < self.num_hidden_layers:
            dense = f"first_k_dense_replace is {self.experts.first_k_dense_replace}"
            found.append(f"{dense}; below the number of layers, {self.num_hidden_layers}, or no layer has experts")
        if self.latent is None:
            return found
        found += self.latent.problems()
        if self.num_key_value_heads != self.num_attention_heads:
            pair = f"{self.num_key_value_heads} for {self.num_attention_heads} heads"
            found.append(f"num_key_value_heads is {pair}; latent attention has a key/value head for each")
        if self.head_dim != self.latent.head_dim:
            found.append(f"head_dim is {self.head_dim}; the two parts of a head have {self.latent.head_dim}")
        if self.qk_norm:
            found.append("qk_norm is true; latent attention has norms of its latents only")
        return found

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of this global number has experts in place of the MLP."""
        return self.experts is not None and layer >= self.experts.first_k_dense_replace

    @classmethod
    def from_config(cls, config: dict[str, Any], *, to_train: bool = True) -> Self:
        """The shape in a Hugging Face ``config.json``.

        Args:
            config: the parsed file.
            to_train: also refuse what changes the computation but not the tensors (such as scaled rotary embedding),
                which a reader of shapes alone may pass over.

        Raises:
            ModelError: with every missing value and every feature that is not built, by name.
        """
        fields = decoder_fields(config, to_train=to_train)
        for name, kind in _NESTED.items():
            of_it = {key: fields.pop(key) for key in list(fields) if key.startswith(f"{name}.")}
            if of_it:
                fields[name] = kind(**{key.removeprefix(f"{name}."): value for key, value in of_it.items()})
        return cls(**fields)

    @classmethod
    def read_config(cls, path: Path, *, to_train: bool = True) -> Self:
        """As :meth:`from_config`, of a file or of the ``config.json`` in a folder."""
        return cls.from_config(read_json(path / "config.json" if path.is_dir() else path), to_train=to_train)

    def to_config(self) -> dict[str, Any]:
        """The Hugging Face ``config.json`` of this shape; :meth:`from_config` reads it back.

        Raises:
            ModelError: no architecture of theirs has this combination.
        """
        return written_config(self.fields())

    def fields(self) -> dict[str, Any]:
        """All values by name, those of a nested value as ``experts.num_experts``."""
        found: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if dataclasses.is_dataclass(value):
                found |= {f"{name}.{inner.name}": getattr(value, inner.name) for inner in dataclasses.fields(value)}
            else:
                found[name] = value
        return found

    def limits(self) -> ModelLimits:
        """What bounds the layouts of this shape."""
        dense = {self.intermediate_size for layer in range(self.num_hidden_layers) if not self.has_experts(layer)}
        shared = {self.experts.shared_width} if self.experts else set()
        return ModelLimits(
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            hidden_size=self.hidden_size,
            # What divides every MLP that there is; where there is none it is 0, which everything divides.
            intermediate_size=math.gcd(*dense, *shared),
            vocab_size=self.vocab_size,
            num_experts=self.experts.num_experts if self.experts else 0,
            moe_intermediate_size=self.experts.moe_intermediate_size if self.experts else 0,
        )


_REALS = ("norm_eps", "rope_theta")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def catalogue(shape: DecoderShape, dtype: str = "float32", optimizer: str = "adamw") -> Catalogue:
    """All logical tensors of a decoder, in the order in which its modules are constructed.

    Args:
        shape: sizes and options.
        dtype: element type of the parameters, one of :data:`dynatrain.space.tensor.ITEMSIZE`.
        optimizer: whose states each parameter has, a key of ``space.optimizers.OPTIMIZERS``; empty for none.
    """
    if dtype not in ITEMSIZE:
        raise ModelError("no such element type", (f"dtype is {dtype!r}; one of {', '.join(ITEMSIZE)}",))
    states = (State("param", dtype),)
    last: tuple[int | str, ...] = (LAST,)
    D = shape.hidden_size  # noqa: N806  # the legend's names
    shape_VD = (shape.vocab_size, D)  # noqa: N806
    first = (FIRST, LAST) if shape.tie_word_embeddings else (FIRST,)
    tensors = [Tensor("embed_tokens.weight", shape_VD, ROWS, first, states, "embedding")]
    if shape.family == GPT2:
        shape_PD = (shape.max_position_embeddings, D)  # noqa: N806
        tensors.append(Tensor("embed_positions.weight", shape_PD, SHARDED, (FIRST,), states, "embedding"))
    for layer in range(shape.num_hidden_layers):
        unit = f"layers.{layer}"
        found = _block(shape, layer)
        tensors += [Tensor(f"{unit}.{name}", dims, cuts, (layer,), states, unit) for name, dims, cuts in found]
        if shape.experts and shape.has_experts(layer):
            buffers = shape.experts.buffers(dtype)
            tensors += [
                Tensor(f"{unit}.mlp.{name}", dims, (), (layer,), (State("buffer", kind),), unit)
                for name, dims, kind in buffers
            ]
    tensors += [Tensor(name, dims, cuts, last, states, "head") for name, dims, cuts in _norm(shape, "norm", D)]
    if not shape.tie_word_embeddings:
        tensors.append(Tensor("lm_head.weight", shape_VD, ROWS, last, states, "head"))
    return beside(tuple(tensors), OPTIMIZERS[optimizer]) if optimizer else tuple(tensors)


def _block(shape: DecoderShape, layer: int) -> Parameters:
    """One transformer block's."""
    D, F = shape.hidden_size, shape.intermediate_size  # noqa: N806  # the legend's names
    yield from _norm(shape, "input_layernorm", D)
    yield from (
        _under("self_attn", shape.latent.parameters(D, shape.num_attention_heads)) if shape.latent else _heads(shape)
    )
    yield from _norm(shape, "post_attention_layernorm", D)
    if shape.experts and shape.has_experts(layer):
        yield from _under("mlp", shape.experts.parameters(D))
    elif shape.family == LLAMA:
        yield from _under("mlp", gated_mlp(D, F))
    else:
        yield from _linear(shape, "mlp.up_proj", (F, D), ROWS)
        yield from _linear(shape, "mlp.down_proj", (D, F), COLUMNS)


def _under(module: str, parameters: Parameters) -> Parameters:
    return ((f"{module}.{name}", dims, cuts) for name, dims, cuts in parameters)


def _heads(shape: DecoderShape) -> Parameters:
    """Grouped-query attention's."""
    D, d = shape.hidden_size, shape.head_dim  # noqa: N806  # the legend's names
    Hd, Kd = shape.num_attention_heads * d, shape.num_key_value_heads * d  # noqa: N806
    yield from _linear(shape, "self_attn.q_proj", (Hd, D), ROWS)
    heads: Cuts = ((f"tp{shape.num_key_value_heads}", 0), ("fsdp", 0))  # whole: more tp ranks than heads hold copies
    yield from _linear(shape, "self_attn.k_proj", (Kd, D), heads)
    yield from _linear(shape, "self_attn.v_proj", (Kd, D), heads)
    yield from _linear(shape, "self_attn.o_proj", (D, Hd), COLUMNS)
    if shape.qk_norm:
        yield from _norm(shape, "self_attn.q_norm", d)
        yield from _norm(shape, "self_attn.k_norm", d)


def _norm(shape: DecoderShape, name: str, width: int) -> Parameters:
    yield f"{name}.weight", (width,), SHARDED
    if shape.family == GPT2:
        yield f"{name}.bias", (width,), SHARDED


def _linear(shape: DecoderShape, name: str, out_by_in: tuple[int, int], cuts: Cuts) -> Parameters:
    yield f"{name}.weight", out_by_in, cuts
    if shape.family == GPT2:
        # Where tp cuts the sum over the inputs, the bias is added once, after the sum: all its ranks hold a copy.
        yield f"{name}.bias", out_by_in[:1], SHARDED if cuts == COLUMNS else cuts
