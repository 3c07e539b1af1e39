import dataclasses
import json
import math

import pytest

from dynatrain.layout.legality import problems
from dynatrain.layout.text import parse_layout
from dynatrain.space.box import chunk, volume
from dynatrain.space.decoder import DecoderShape, catalogue
from dynatrain.space.hf_config import ModelError
from dynatrain.space.ownership import declared
from dynatrain.space.presets import PRESETS, resolve_model
from dynatrain.space.tensor import FIRST, LAST, State

TINY = PRESETS["tiny"]
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_embd": 64,
    "n_head": 4,
    "n_inner": None,
    "n_layer": 2,
    "n_positions": 128,
    "vocab_size": 100,
    "attn_pdrop": 0.0,
    "layer_norm_epsilon": 1e-05,
}


@pytest.mark.parametrize(
    ("name", "billions", "tolerance"),
    [
        ("tiny", 0.0018, 0.03),
        ("25m", 0.025, 0.03),
        ("200m", 0.201, 0.03),
        ("600m", 0.6, 0.03),
        ("gpt2", 0.12444, 0.0001),
        ("llama-3.1-8b", 8.03, 0.001),
        ("llama-3.1-70b", 70.6, 0.001),
        ("llama-3.1-405b", 405.9, 0.001),
        ("qwen3-30b-a3b", 30.53, 0.001),
        ("qwen3-235b-a22b", 235.1, 0.001),
        ("deepseek-v3", 671, 0.001),
        ("kimi-k2", 1026, 0.001),
    ],
)
def test_a_preset_has_the_parameters_that_its_name_says(name, billions, tolerance):
    total = sum(tensor.numel for tensor in catalogue(PRESETS[name]))

    assert total == pytest.approx(billions * 1e9, rel=tolerance)


@pytest.mark.parametrize("name", ["tiny", "25m", "200m", "600m", "gpt2"])
def test_small_presets_run_in_every_layout_of_four_ranks(name):
    texts = ["dp4", "fsdp4", "dp2.fsdp2", "tp4", "tp4-sp", "fsdp2.tp2", "dp2.tp2-sp", "pp4", "pp2.fsdp2", "pp2.tp2"]
    found = {
        text: problems(parse_layout(text), PRESETS[name].limits(), world_size=4, num_microbatches=8, sequence=64)
        for text in texts
    }

    assert set(found.values()) == {()}


def test_a_qwen3_config_reads_with_its_norms_and_its_tied_embedding():
    shape = DecoderShape.from_config(QWEN3)

    assert (shape.qk_norm, shape.tie_word_embeddings, shape.rope_theta) == (True, True, 1000000)
    assert sum(tensor.numel for tensor in catalogue(shape)) == 596_049_920


def test_a_llama_config_may_leave_out_what_its_class_has_a_default_for():
    shape = DecoderShape.from_config(LLAMA)

    assert (shape.num_key_value_heads, shape.head_dim, shape.norm_eps) == (4, 16, 1e-6)
    assert (shape.rope_theta, shape.max_position_embeddings, shape.qk_norm) == (10000.0, 2048, False)


def test_rope_theta_may_sit_in_rope_parameters():
    config = LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}

    assert DecoderShape.from_config(config).rope_theta == 500000.0


def test_scaled_rotary_embedding_is_refused_by_name_when_the_model_is_to_train():
    config = LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}

    with pytest.raises(ModelError, match="rope_scaling of type 'llama3'"):
        DecoderShape.from_config(config)
    assert DecoderShape.from_config(config, to_train=False) == DecoderShape.from_config(LLAMA)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"attention_bias": True}, "attention_bias is not built"),
        ({"mlp_bias": True}, "mlp_bias is not built"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters of type 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_dropout": 1.0}, "attention_dropout is 1.0"),
        ({"hidden_size": "64"}, "hidden_size is '64'; int is needed"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_key_value_heads": 3}, "3 do not divide 4"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"resid_pdrop": 1.0}, "dropout is 1.0"),
        ({"rms_norm_eps": 0}, "norm_eps is 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ],
)
def test_a_config_that_would_give_another_model_is_refused_by_name(change, named):
    with pytest.raises(ModelError) as caught:
        DecoderShape.from_config(LLAMA | change)

    assert named in str(caught.value)


def test_a_gpt_2_config_reads_in_its_own_words():
    shape = DecoderShape.from_config(GPT2)

    assert (shape.family, shape.hidden_size, shape.intermediate_size, shape.head_dim) == ("gpt2", 64, 256, 16)
    assert (shape.num_hidden_layers, shape.num_key_value_heads, shape.max_position_embeddings) == (2, 4, 128)
    assert (shape.tie_word_embeddings, shape.dropout, shape.attention_dropout) == (True, 0.1, 0.0)
    assert DecoderShape.from_config(GPT2 | {"attn_pdrop": None}).attention_dropout == 0.1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_embd": None}, "n_embd is missing"),
        ({"n_layer": 1.5}, "n_layer is 1.5; int is needed"),
        ({"n_layer": 10**7}, "n_layer is 10000000; at most 4096 is built"),
        ({"n_embd": 10**30}, "n_embd is 1000000000000000000000000000000; at most 2147483648"),
        ({"layer_norm_epsilon": 10**400}, "at most 2147483648 is built"),
        ({"layer_norm_epsilon": math.nan}, "layer_norm_epsilon is nan; at most"),
        ({"activation_function": "relu"}, "activation_function 'relu' is not built; only 'gelu_new'"),
        ({"add_cross_attention": True}, "add_cross_attention is not built"),
        ({"embd_pdrop": 0.0}, "embd_pdrop 0.0 beside resid_pdrop 0.1"),
        ({"scale_attn_weights": False}, "scale_attn_weights false"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is not built"),
        ({"n_head": 5}, "hidden_size is 64; gpt2 needs the width of its heads, 5 heads of 12"),
    ],
)
def test_a_gpt_2_config_that_would_give_another_model_is_refused_by_name(change, named):
    with pytest.raises(ModelError) as caught:
        DecoderShape.from_config(GPT2 | change)

    assert named in str(caught.value)


def test_dropout_is_passed_over_by_a_reader_of_tensors_alone():
    published = GPT2 | {"embd_pdrop": 0.2}

    assert DecoderShape.from_config(published, to_train=False) == DecoderShape.from_config(GPT2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"family": "bert"}, "family is 'bert'; one of llama, gpt2"),
        ({"qk_norm": True}, "gpt2 has no norms of heads"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2 for 4 heads"),
        ({"head_dim": 8}, "hidden_size is 64"),
        ({"experts": PRESETS["kimi-k2"].experts}, "no experts and no latent"),
    ],
)
def test_a_shape_that_a_family_has_not_is_refused(change, named):
    with pytest.raises(ModelError) as caught:
        dataclasses.replace(DecoderShape.from_config(GPT2), **change)

    assert named in str(caught.value)


def test_everything_wrong_with_a_config_is_reported_at_once():
    with pytest.raises(ModelError) as caught:
        DecoderShape.from_config({"architectures": ["Qwen3ForCausalLM"], "mlp_bias": True, "vocab_size": 1.5})

    assert len(caught.value.problems) == 8  # six missing, one of a wrong kind, one not built


@pytest.mark.parametrize(
    "shape",
    [
        *PRESETS.values(),
        dataclasses.replace(TINY, qk_norm=True, tie_word_embeddings=True, dropout=0.25, norm_eps=1e-6),
        dataclasses.replace(PRESETS["gpt2"], tie_word_embeddings=False, dropout=0.25, attention_dropout=0.5),
    ],
)
def test_a_written_config_reads_back_equal(shape, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(shape.to_config()))

    assert resolve_model(str(tmp_path), to_train=True) == shape
    assert resolve_model(str(tmp_path / "config.json")) == shape


def test_an_unknown_model_is_refused_with_the_nearest_names():
    with pytest.raises(ModelError, match=r"no model 'llama-3.1-7b'[\s\S]*nearest: .*llama-3.1-8b"):
        resolve_model("llama-3.1-7b")


@pytest.mark.parametrize(
    ("content", "named"),
    [("{", "is not JSON"), ("[" * 100_000, "too many brackets"), ("[]", "holds a list, not a JSON object")],
)
def test_a_broken_config_file_is_refused_with_its_path(content, named, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(content)

    with pytest.raises(ModelError, match=named) as caught:
        resolve_model(str(path))
    assert str(path) in str(caught.value)


def test_a_folder_without_a_config_is_refused_with_the_missing_path(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        resolve_model(str(tmp_path))


def test_the_catalogue_is_in_the_order_of_construction():
    shape = dataclasses.replace(TINY, num_hidden_layers=1, qk_norm=True)

    assert [tensor.name for tensor in catalogue(shape)] == [
        "embed_tokens.weight",
        "layers.0.input_layernorm.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.v_proj.weight",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.self_attn.q_norm.weight",
        "layers.0.self_attn.k_norm.weight",
        "layers.0.post_attention_layernorm.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight",
        "norm.weight",
        "lm_head.weight",
    ]


def test_weights_are_out_by_in_and_cut_along_the_dim_that_tensor_parallel_splits():
    shape = dataclasses.replace(TINY, head_dim=20, qk_norm=True)  # heads x head_dim is not the hidden size
    found = {tensor.name.removeprefix("layers.3."): (tensor.shape, tensor.cuts) for tensor in catalogue(shape)}
    rows, columns, sharded = (("tp", 0), ("fsdp", 0)), (("tp", 1), ("fsdp", 0)), (("fsdp", 0),)
    heads = (("tp4", 0), ("fsdp", 0))

    assert found["self_attn.q_proj.weight"] == ((160, 128), rows)
    assert found["self_attn.k_proj.weight"] == found["self_attn.v_proj.weight"] == ((80, 128), heads)
    assert found["self_attn.o_proj.weight"] == ((128, 160), columns)
    assert found["self_attn.q_norm.weight"] == found["self_attn.k_norm.weight"] == ((20,), sharded)
    assert found["mlp.gate_proj.weight"] == found["mlp.up_proj.weight"] == ((384, 128), rows)
    assert found["mlp.down_proj.weight"] == ((128, 384), columns)
    assert found["input_layernorm.weight"] == found["norm.weight"] == ((128,), sharded)
    assert found["embed_tokens.weight"] == found["lm_head.weight"] == ((4096, 128), rows)


def test_gpt_2_has_biases_cut_like_the_outputs_that_tensor_parallel_splits():
    shape = dataclasses.replace(PRESETS["gpt2"], num_hidden_layers=1)
    found = {tensor.name.removeprefix("layers.0."): (tensor.shape, tensor.cuts) for tensor in catalogue(shape)}
    rows, columns, sharded = (("tp", 0), ("fsdp", 0)), (("tp", 1), ("fsdp", 0)), (("fsdp", 0),)

    assert list(found)[:2] == ["embed_tokens.weight", "embed_positions.weight"]
    assert found["embed_positions.weight"] == ((1024, 768), sharded)
    assert found["self_attn.q_proj.bias"] == ((768,), rows)
    assert found["self_attn.v_proj.bias"] == ((768,), (("tp12", 0), ("fsdp", 0)))
    assert found["self_attn.o_proj.weight"] == ((768, 768), columns)
    assert found["self_attn.o_proj.bias"] == found["mlp.down_proj.bias"] == ((768,), sharded)
    assert found["mlp.up_proj.bias"] == ((3072,), rows)
    assert found["input_layernorm.bias"] == found["norm.bias"] == ((768,), sharded)
    assert not {name for name in found if "gate" in name or "lm_head" in name}


def test_a_tied_embedding_is_one_tensor_held_first_and_last():
    tied = catalogue(dataclasses.replace(TINY, tie_word_embeddings=True))
    untied = catalogue(TINY)

    assert tied[0].anchors == (FIRST, LAST)
    assert [tensor.name for tensor in tied] == [tensor.name for tensor in untied[:-1]]
    assert (untied[0].anchors, untied[-1].anchors, untied[-2].anchors) == ((FIRST,), (LAST,), (LAST,))


def test_units_are_blocks_embedding_and_head():
    assert list(dict.fromkeys(tensor.unit for tensor in catalogue(TINY))) == [
        "embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head",
    ]  # fmt: skip


def test_moments_have_the_type_of_the_parameter_and_the_step_is_one_fp32_number():
    assert catalogue(TINY, dtype="float64")[0].states == (
        State("param", "float64"),
        State("exp_avg", "float64"),
        State("exp_avg_sq", "float64"),
        State("step", "float32", scalar=True),
    )
    assert catalogue(TINY, optimizer="")[0].states == (State("param", "float32"),)


def test_an_unknown_element_type_is_refused():
    with pytest.raises(ModelError, match="dtype is 'fp32'; one of float64, float32"):
        catalogue(TINY, dtype="fp32")


def test_declared_boxes_of_one_copy_cover_each_tensor_once():
    layout = parse_layout("pp2_1_3.dp2.fsdp3.tp2")
    tensors = catalogue(dataclasses.replace(TINY, qk_norm=True, vocab_size=257, tie_word_embeddings=True))
    owned = declared(tensors, layout, 4)
    for tensor in tensors:
        held = sum(volume(box) for rank in range(24) if (box := owned.box(tensor, rank)))

        assert held == tensor.numel * owned.copies(tensor), tensor.name
    assert chunk(0, 257, 2, 1) == (129, 257)
