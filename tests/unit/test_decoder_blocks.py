"""Decoders with experts or latent attention: read from configs, refused by name, and their tensors."""

from dataclasses import replace

import pytest
from tests.published import CONFIGS
from tests.unit.test_decoder_shape import LLAMA, TINY

from dynatrain.space.blocks import Experts
from dynatrain.space.decoder import DecoderShape, catalogue
from dynatrain.space.hf_config import ModelError
from dynatrain.space.presets import PRESETS
from dynatrain.space.tensor import State

MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {name: value for name, value in CONFIGS["deepseek-v3"].items() if "scaling" not in name} | {
    "quantization_config": None
}


def test_a_mixtral_config_says_with_one_number_how_wide_its_experts_are():
    shape = DecoderShape.from_config(MIXTRAL)

    assert shape.experts == Experts(
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, router_aux_loss_coef=0.001
    )
    assert (shape.rope_theta, shape.norm_eps, shape.max_position_embeddings) == (1e6, 1e-5, 131072)


def test_a_deepseek_config_reads_with_its_gate_its_groups_and_its_latents():
    shape = DecoderShape.from_config(DEEPSEEK)

    assert (shape.experts.gate, shape.experts.n_group, shape.experts.topk_group) == ("sigmoid", 8, 4)
    assert (shape.head_dim, shape.latent.qk_nope_head_dim, shape.latent.qk_rope_head_dim) == (192, 128, 64)
    assert [shape.has_experts(layer) for layer in (0, 2, 3, 60)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (MIXTRAL, {"num_local_experts": None}, "num_local_experts is missing"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; at most the experts to choose from, 8"),
        (MIXTRAL, {"sliding_window": 4096}, "sliding_window 4096 is not built; only null"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise is not built"),
        (MIXTRAL, {"router_aux_loss_coef": -1}, "router_aux_loss_coef is -1; at least 0"),
        (CONFIGS["qwen3-30b-a3b"], {"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not built; only 1"),
        (CONFIGS["qwen3-30b-a3b"], {"mlp_only_layers": [3]}, "mlp_only_layers [3] is not built; only []"),
        (CONFIGS["qwen3-30b-a3b"], {"num_experts": 0}, "num_experts is 0; at least 1"),
        (CONFIGS["qwen3-30b-a3b"], {"norm_topk_prob": 1}, "norm_topk_prob is 1; bool is needed"),
        (DEEPSEEK, {"q_lora_rank": None}, "q_lora_rank is missing"),
        (DEEPSEEK, {"kv_lora_rank": 0}, "kv_lora_rank is 0; at least 1"),
        (DEEPSEEK, {"qk_rope_head_dim": 65}, "qk_rope_head_dim is 65; rotary embedding needs an even number"),
        (DEEPSEEK, {"num_key_value_heads": 8}, "num_key_value_heads is 8 for 128 heads; latent attention has"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func 'softmax' is not built; only 'sigmoid'"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave false is not built"),
        (DEEPSEEK, {"n_group": 7}, "n_group is 7 for 256 experts; groups are of equal size"),
        (DEEPSEEK, {"n_group": 256}, "n_group is 256 for 256 experts; groups are of equal size, and of two"),
        (DEEPSEEK, {"topk_group": 9}, "topk_group is 9; at most n_group, 8"),
        (DEEPSEEK, {"n_shared_experts": -1}, "n_shared_experts is -1; at least 0"),
        (DEEPSEEK, {"first_k_dense_replace": 61}, "first_k_dense_replace is 61; below the number of layers, 61"),
        (DEEPSEEK, {"routed_scaling_factor": 0}, "routed_scaling_factor is 0; above 0"),
    ],
)
def test_experts_or_latents_that_cannot_be_are_refused_by_name(config, change, named):
    with pytest.raises(ModelError) as caught:
        DecoderShape.from_config(config | change)

    (problem,) = caught.value.problems
    assert named in problem


def test_experts_are_stacked_by_global_number_and_cut_by_axes_of_their_own():
    shape = DecoderShape.from_config(MIXTRAL)
    found = {tensor.name: (tensor.shape, tensor.cuts, tensor.states[0]) for tensor in catalogue(shape)}
    value, last = State("param", "float32"), "layers.1.mlp"

    assert [name for name in found if ".0.mlp" in name] == [
        "layers.0.mlp.gate.weight",
        "layers.0.mlp.experts.gate_proj",
        "layers.0.mlp.experts.up_proj",
        "layers.0.mlp.experts.down_proj",
    ]
    assert found[f"{last}.gate.weight"] == ((8, 64), (("fsdp", 0),), value)
    rows = ((8, 128, 64), (("ep", 0), ("etp", 1), ("efsdp", 0)), value)
    assert found[f"{last}.experts.gate_proj"] == found[f"{last}.experts.up_proj"] == rows
    columns = (("ep", 0), ("etp", 2), ("efsdp", 0))
    assert found[f"{last}.experts.down_proj"] == ((8, 64, 128), columns, value)


@pytest.mark.parametrize(("dtype", "wide"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_a_bias_that_balances_and_its_counters_are_buffers_that_every_rank_holds(dtype, wide):
    tensors = {tensor.name: tensor for tensor in catalogue(PRESETS["deepseek-v3"], dtype)}
    buffers = [tensor for tensor in tensors.values() if tensor.states[0].name == "buffer"]

    assert len(buffers) == 2 * (61 - 3)
    bias, counters = buffers[-2:]
    assert bias.name == "layers.60.mlp.gate.e_score_correction_bias"
    assert (bias.states, bias.shape, bias.cuts, bias.anchors) == ((State("buffer", wide),), (256,), (), (60,))
    assert (counters.name, counters.states) == ("layers.60.mlp.gate.tokens_per_expert", (State("buffer", "int64"),))


def test_latents_are_copies_on_the_ranks_of_tp_and_heads_are_cut_by_it():
    found = {tensor.name.removeprefix("layers.9."): tensor for tensor in catalogue(PRESETS["deepseek-v3"])}
    rows, columns, sharded = (("tp", 0), ("fsdp", 0)), (("tp", 1), ("fsdp", 0)), (("fsdp", 0),)
    attention = {name: (tensor.shape, tensor.cuts) for name, tensor in found.items() if name.startswith("self_attn")}

    assert attention == {
        "self_attn.q_a_proj.weight": ((1536, 7168), sharded),
        "self_attn.q_a_layernorm.weight": ((1536,), sharded),
        "self_attn.q_b_proj.weight": ((128 * 192, 1536), rows),
        "self_attn.kv_a_proj_with_mqa.weight": ((576, 7168), sharded),
        "self_attn.kv_a_layernorm.weight": ((512,), sharded),
        "self_attn.kv_b_proj.weight": ((128 * 256, 512), rows),
        "self_attn.o_proj.weight": ((7168, 128 * 128), columns),
    }
    assert found["mlp.shared_experts.down_proj.weight"].cuts == columns
    assert found["mlp.shared_experts.down_proj.weight"].shape == (7168, 2048)


@pytest.mark.parametrize(("name", "widths"), [("deepseek-v3", 2048), ("qwen3-30b-a3b", 0), ("llama-3.1-8b", 14336)])
def test_a_layout_is_bound_by_the_mlps_that_there_are(name, widths):
    assert PRESETS[name].limits().intermediate_size == widths


def test_a_shape_that_no_architecture_has_is_not_written():
    shape = replace(TINY, experts=replace(PRESETS["kimi-k2"].experts))

    with pytest.raises(ModelError, match="Hugging Face has no architecture for this combination"):
        shape.to_config()
