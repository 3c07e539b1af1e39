"""Where logical tensors lie in Hugging Face's files: all of them, once, and nothing else is taken for a model."""

from dataclasses import replace

import pytest
from tests.shapes import MIXTRAL, QWEN3_MOE, experts_shape, latent_shape, small_shape

from dynatrain.space.box import volume
from dynatrain.space.decoder import catalogue
from dynatrain.space.hf_config import ModelError
from dynatrain.space.hf_names import file_parts, file_shapes, located

LLAMA = small_shape()
GPT2 = small_shape(family="gpt2", num_key_value_heads=4, tie_word_embeddings=True)
DEEPSEEK = latent_shape()
SHAPES = {
    "llama": LLAMA,
    "qwen3, tied": small_shape(qk_norm=True, tie_word_embeddings=True),
    "mixtral": experts_shape(MIXTRAL),
    "qwen3 moe": experts_shape(QWEN3_MOE, qk_norm=True),
    "deepseek v3": DEEPSEEK,
    "gpt2, tied": GPT2,
    "gpt2, untied": small_shape(family="gpt2", num_key_value_heads=4),
}


def files_of(shape, **changes):
    """What the files of a model have, with some tensors changed, added, or (None) left out."""
    found = {name: ("float32", dims) for name, dims in file_shapes(shape).items()} | changes
    return {name: entry for name, entry in found.items() if entry is not None}


def refusal(shape, found):
    with pytest.raises(ModelError) as caught:
        located(shape, found)
    return caught.value.problems


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parts_are_the_whole_of_each_tensor_and_of_each_file_tensor(shape):
    parts = file_parts(shape)
    in_files = {}
    for tensor in catalogue(shape):
        if tensor.name.endswith("tokens_per_expert"):
            assert tensor.name not in parts  # it begins at zero
            continue
        assert sum(volume(part.box) for part in parts[tensor.name]) == tensor.numel
        for part in parts[tensor.name]:
            in_files.setdefault(part.tensor, []).append(part.file_box)

    assert in_files.keys() == file_shapes(shape).keys()
    for name, dims in file_shapes(shape).items():
        elements = {(i, j) for box in in_files[name] for i in range(*box[0]) for j in range(*(box[1:] or [(0, 1)])[0])}
        assert len(elements) == sum(map(volume, in_files[name])) == volume(tuple((0, n) for n in dims))


def test_gpt_2_fuses_queries_keys_and_values_and_stands_transposed():
    parts = file_parts(GPT2)

    (keys,) = parts["layers.1.self_attn.k_proj.weight"]
    assert (keys.tensor, keys.file_box, keys.transposed) == (
        "transformer.h.1.attn.c_attn.weight",
        ((0, 64), (64, 128)),
        True,
    )
    (bias,) = parts["layers.1.self_attn.v_proj.bias"]
    assert (bias.tensor, bias.file_box, bias.transposed) == ("transformer.h.1.attn.c_attn.bias", ((128, 192),), False)
    (down,) = parts["layers.0.mlp.down_proj.weight"]
    assert (down.tensor, down.file_box, down.transposed) == (
        "transformer.h.0.mlp.c_proj.weight",
        ((0, 96), (0, 64)),
        True,
    )
    assert not parts["embed_tokens.weight"][0].transposed


def test_each_expert_lies_apart_under_its_global_number():
    parts = file_parts(DEEPSEEK)["layers.2.mlp.experts.down_proj"]

    assert [part.box for part in parts] == [((e, e + 1), (0, 64), (0, 32)) for e in range(8)]
    assert {part.file_box for part in parts} == {((0, 64), (0, 32))}
    assert parts[5].tensor == "model.layers.2.mlp.experts.5.down_proj.weight"


def test_mixtral_has_its_own_names():
    parts = file_parts(SHAPES["mixtral"])
    module = "model.layers.1.block_sparse_moe"

    assert parts["layers.1.mlp.gate.weight"][0].tensor == f"{module}.gate.weight"
    found = {name: parts[f"layers.1.mlp.experts.{name}"][3].tensor for name in ("gate_proj", "up_proj", "down_proj")}
    assert found == {
        "gate_proj": f"{module}.experts.3.w1.weight",
        "up_proj": f"{module}.experts.3.w3.weight",
        "down_proj": f"{module}.experts.3.w2.weight",
    }


def test_the_layer_that_predicts_further_is_passed_over_where_deepseek_s_files_have_it():
    own = {f"model.layers.3.{name}.weight": ("float32", (64, 128)) for name in ("eh_proj", "enorm", "hnorm")}
    more = own | {"model.layers.3.mlp.up_proj.weight": ("int8", (1,))}

    assert located(DEEPSEEK, files_of(DEEPSEEK, **more)) == located(DEEPSEEK, files_of(DEEPSEEK))
    (problem,) = refusal(DEEPSEEK, files_of(DEEPSEEK, **{"model.layers.4.eh_proj.weight": ("float32", (64, 128))}))
    assert "layers.4.eh_proj.weight is there, but" in problem


def test_a_layer_of_the_model_that_its_config_does_not_count_is_not_passed_over():
    full = files_of(DEEPSEEK)

    assert "model.layers.2.self_attn.kv_a_proj_with_mqa.weight" in full
    problems = refusal(replace(DEEPSEEK, num_hidden_layers=2), full)
    assert any("model.layers.2.self_attn.kv_a_proj_with_mqa.weight is there, but" in problem for problem in problems)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_names_are_read_with_the_prefix_and_without(shape):
    full = files_of(shape)
    bare = {name.removeprefix("model.").removeprefix("transformer."): entry for name, entry in full.items()}

    assert located(shape, full) == {name: name for name in full}
    assert set(located(shape, bare).values()) == set(bare)
    assert len(bare.keys() & full.keys()) == ("lm_head.weight" in full)


def test_tables_that_are_computed_are_passed_over():
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": ("float32", (8,)), "h.0.attn.bias": ("bool", (1, 1))}

    assert located(LLAMA, files_of(LLAMA, **tables)) == located(LLAMA, files_of(LLAMA))


def test_the_head_of_a_tied_model_is_told_where_it_is_there():
    shape = SHAPES["qwen3, tied"]
    head = {"lm_head.weight": ("float32", (61, 64))}

    assert located(shape, files_of(shape, **head)).keys() - located(shape, files_of(shape)).keys() == {"lm_head.weight"}


def test_an_expert_that_is_missing_is_told_by_its_number():
    name = "model.layers.1.mlp.experts.6.up_proj.weight"

    assert refusal(DEEPSEEK, files_of(DEEPSEEK, **{name: None})) == (f"{name} is missing",)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model.norm.weight": None}, "model.norm.weight is missing"),
        ({"lm_head.weight": None}, "tie_word_embeddings true"),
        ({"model.layers.0.mlp.up_proj.bias": ("float32", (96,))}, "up_proj.bias is there, but"),
        ({"model.layers.2.mlp.up_proj.weight": ("float32", (96, 64))}, "layers.2.mlp.up_proj.weight is there, but"),
        ({"norm.weight": ("float32", (64,))}, "is there twice, as model.norm.weight and as norm.weight"),
        ({"model.norm.weight": ("float32", (65,))}, "has shape [65]; config.json makes it [64]"),
        ({"model.norm.weight": ("int8", (64,))}, "is of int8; weights are of float64, float32"),
    ],
)
def test_files_of_another_model_are_refused_by_name(changes, named):
    (problem,) = refusal(LLAMA, files_of(LLAMA, **changes))

    assert named in problem


def test_all_that_is_wrong_is_told_at_once_and_a_long_list_is_cut():
    both = {"model.norm.weight": ("int8", (65,)), "lm_head.weight": None, "lm_head.bias": ("float32", (61,))}

    assert len(refusal(LLAMA, files_of(LLAMA, **both))) == 4
    *told, more = refusal(LLAMA, {})
    assert len(told) == 20
    assert more == "and 1 more like these"
