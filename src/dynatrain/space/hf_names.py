"""Where each logical tensor of a decoder lies in a Hugging Face folder: which file tensor, which box of it, which way.

Files have Llama's tensors as we do, under a prefix, but each expert's apart. GPT-2's keep queries, keys and values
fused in one tensor, and linear weights as ``[in, out]``. All of that is a value here: whoever reads or writes makes
views by it, and copies boxes.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from dynatrain.space.blocks import COUNTERS
from dynatrain.space.box import Box, whole
from dynatrain.space.decoder import GPT2, DecoderShape, catalogue
from dynatrain.space.hf_config import ModelError, architecture_of

HEAD = "lm_head.weight"
"""The head in a file, which has no prefix. Absent where it is tied."""

READ_DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Element types that a model's tensor may have in a file."""

_BLOCK = {
    "input_layernorm": "ln_1",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_AROUND = {"embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f"}
_FUSED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_PREFIX = re.compile(r"(model|transformer)\.")
_BUFFER = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")
"""Tables that old versions wrote beside the parameters; they are computed."""
_OF_FURTHER_LAYER = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
"""What joins the token that is known to the state that predicts the next but one."""
_NAMED_AT_MOST = 20


@dataclass(frozen=True, slots=True)
class FilePart:
    """A box of a logical tensor, as the files have it.

    Attributes:
        box: in the logical tensor.
        tensor: name of the file tensor, as it is written.
        file_box: in the file tensor; without the first dim where that holds one expert.
        transposed: the file tensor has the two dims the other way round.
    """

    box: Box
    tensor: str
    file_box: Box
    transposed: bool = False


def file_parts(shape: DecoderShape) -> dict[str, tuple[FilePart, ...]]:
    """Of each logical tensor, its parts: together the whole of it, without overlap. What no file has is absent.

    Raises:
        ModelError: no architecture of Hugging Face has this shape.
    """
    architecture = architecture_of(shape.fields()).model_type
    found: dict[str, tuple[FilePart, ...]] = {}
    for tensor in catalogue(shape, optimizer=""):
        if tensor.name.endswith(COUNTERS):
            continue
        if shape.family == GPT2:
            found[tensor.name] = (_gpt2_part(tensor.name, tensor.shape),)
        elif ".experts." in tensor.name:
            found[tensor.name] = tuple(_expert_parts(tensor.name, tensor.shape, architecture))
        else:
            name = _llama_name(tensor.name)
            if architecture == "mixtral":
                name = name.replace(".mlp.", ".block_sparse_moe.")
            found[tensor.name] = (FilePart(whole(tensor.shape), name, whole(tensor.shape)),)
    return found


def file_shapes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Shape of each file tensor by its name as it is written, in the order of the catalogue."""
    found: dict[str, tuple[int, ...]] = {}
    for parts in file_parts(shape).values():
        for part in parts:
            stops = tuple(stop for _, stop in part.file_box)
            found[part.tensor] = tuple(map(max, found.get(part.tensor, stops), stops))
    return found


def located(shape: DecoderShape, found: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, str]:
    """Under which name the files have each tensor.

    Args:
        shape: of the model.
        found: dtype and shape of every tensor in the files, by its name there: with the prefix or without.

    Returns:
        Name as it is written -> name in the files. The head of a tied model is in it where the files have one: it has
        to be held against the embedding.

    Raises:
        ModelError: with every tensor that is missing, there twice, of no use, of another shape, or no real numbers.
    """
    wanted = file_shapes(shape)
    optional = {} if HEAD in wanted else {HEAD: (shape.vocab_size, shape.hidden_size)}
    by_bare = {_PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name: name for name in wanted | optional}
    names: dict[str, str] = {}
    problems = []
    further = _further_layer(shape, found)
    for name in found:
        if further and name.removeprefix("model.").startswith(further):
            continue
        bare = _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name
        written = by_bare.get(bare)
        if written is None:
            if not _BUFFER.fullmatch(name):
                problems.append(f"{name} is there, but the model of config.json has no such tensor")
        elif written in names:
            problems.append(f"{written} is there twice, as {names[written]} and as {name}")
        else:
            names[written] = name
    problems += [_missing(name) for name in wanted if name not in names]
    for written, name in names.items():
        problems += _misfits(name, *found[name], (wanted | optional)[written])
    if problems:
        more = len(problems) - _NAMED_AT_MOST
        told = [*problems[:_NAMED_AT_MOST], *([f"and {more} more like these"] if more > 0 else [])]
        raise ModelError("these weights are not those of the model that config.json describes", tuple(told))
    return names


def _further_layer(shape: DecoderShape, names: Collection[str]) -> str:
    """What the names of the layer behind the last begin with that DeepSeek's files have, which predicts one token more.

    Empty where there is none: a layer of that number is one only if it has what no layer of the model has.
    """
    further = f"layers.{shape.num_hidden_layers}."
    own = {name.removeprefix("model.").removeprefix(further) for name in names}
    return further if shape.latent is not None and own.issuperset(_OF_FURTHER_LAYER) else ""


def _missing(name: str) -> str:
    hint = "; a model that shares it with the embedding says tie_word_embeddings true" if name == HEAD else ""
    return f"{name} is missing{hint}"


def _misfits(name: str, dtype: str, seen: tuple[int, ...], wanted: tuple[int, ...]) -> Iterator[str]:
    if seen != wanted:
        yield f"{name} has shape {list(seen)}; config.json makes it {list(wanted)}"
    if dtype not in READ_DTYPES:
        yield f"{name} is of {dtype}; weights are of {', '.join(READ_DTYPES)}"


def _llama_name(name: str) -> str:
    return name if name == HEAD else f"model.{name}"


def _expert_parts(name: str, shape: tuple[int, ...], architecture: str) -> Iterator[FilePart]:
    """Each expert of a stacked tensor, which has its own file tensor."""
    module, projection = _llama_name(name).rsplit(".", 1)
    if architecture == "mixtral":
        module, projection = module.replace(".mlp.", ".block_sparse_moe."), _MIXTRAL[projection]
    one = whole(shape[1:])
    for expert in range(shape[0]):
        yield FilePart(((expert, expert + 1), *one), f"{module}.{expert}.{projection}.weight", one)


def _gpt2_part(name: str, shape: tuple[int, ...]) -> FilePart:
    """Linear weights stand transposed, and queries, keys and values share one tensor along its outputs."""
    if name == HEAD:
        return FilePart(whole(shape), name, whole(shape))
    owner, kind = name.rsplit(".", 1)
    if owner in _AROUND:
        return FilePart(whole(shape), f"transformer.{_AROUND[owner]}.{kind}", whole(shape))
    _, layer, module = owner.split(".", 2)
    tensor = f"transformer.h.{layer}.{_BLOCK[module]}.{kind}"
    transposed = len(shape) == 2
    *inputs, outputs = whole(shape[::-1])
    if module in _FUSED:
        start = _FUSED.index(module) * shape[0]
        outputs = (start, start + shape[0])
    return FilePart(whole(shape), tensor, (*inputs, outputs), transposed)
