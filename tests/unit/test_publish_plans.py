"""Plans from a run's layout into an engine's own tensors: every element once, where the engine expects it."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.shapes import MIXTRAL, QWEN3_MOE, experts_shape, latent_shape, small_shape

from dynatrain.judge.judge import judge_all
from dynatrain.judge.publish import judge_deliveries
from dynatrain.layout.form import LayoutError
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import parse_layout
from dynatrain.plan.plan import Transform
from dynatrain.plan.publish import CALL_SECONDS, Publication, copied_bytes, predicted_bytes, round_bytes_at
from dynatrain.space.box import volume, whole, within
from dynatrain.space.decoder import catalogue
from dynatrain.space.engine import Engine
from dynatrain.space.engine_names import FUSED
from dynatrain.space.hf_config import ModelError
from dynatrain.space.hf_names import file_parts, file_shapes
from dynatrain.space.ownership import declared
from dynatrain.train.publisher import EngineTarget, Publisher, _Known

LLAMA = small_shape(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=8)
GPT2 = small_shape(
    family="gpt2", num_key_value_heads=4, num_hidden_layers=4, tie_word_embeddings=True, max_position_embeddings=63
)
QWEN3 = experts_shape(QWEN3_MOE, num_key_value_heads=4, qk_norm=True)
DEEPSEEK = latent_shape()


def published(shape, run, engine, **options):
    held = catalogue(shape)
    layout = resolve(parse_layout(run), shape.num_hidden_layers)
    far = Engine.of(shape, engine, held, **options)
    return Publication.of(far, declared(held, layout, shape.num_hidden_layers), 1 << 14)


def by_rank(plan, holders):
    """The deliveries of some holders of the run, by the engine's rank."""
    found = {}
    for holder in holders:
        for of_round in plan.rounds(plan.deliveries(plan.part(holder).sends)):
            for rank, its in of_round.items():
                found.setdefault(rank, []).extend(its)
    return found


def values(shape):
    """Numbers that tell every element of every tensor apart."""
    found, first = {}, 0
    for tensor in catalogue(shape, optimizer=""):
        size = int(np.prod(tensor.shape))
        found[tensor.name] = np.arange(first, first + size).reshape(tensor.shape)
        first += size
    return found


def expected(shape, plan, rank):
    """What a rank of the engine is to have, made by concatenating what it owns of whole tensors."""
    right, engine = values(shape), plan.engine
    logical = {tensor.name: tensor for tensor in engine.catalogue}
    made = {}
    for tensor in engine.tensors:
        parts = []
        for one in tensor.components:
            box = engine.ownership.box(logical[one.tensor], rank)
            if box is not None and one.expert in (None, *range(*box[0])):
                mine = ((one.expert, one.expert + 1), *box[1:]) if one.expert is not None else box
                part = right[one.tensor][within(mine, whole(logical[one.tensor].shape))]
                part = part if one.expert is None else part[0]
                parts.append(part.T if one.transposed else part)
        if parts:
            made[tensor.name] = np.concatenate(parts, axis=tensor.dim)
    return made


CASES = [
    (LLAMA, "fsdp4", "tp2", FUSED),
    (LLAMA, "pp2.tp2", "tp4", FUSED),
    (LLAMA, "dp2.fsdp2", "dp2.tp2", FUSED),
    (LLAMA, "fsdp2.tp2", "tp8", FUSED),
    (LLAMA, "pp4", "pp2.tp2", FUSED),
    (GPT2, "fsdp4", "tp2", FUSED),
    (GPT2, "tp4", "dp1", FUSED),
    (QWEN3, "fsdp4.ep4", "tp2", FUSED),
    (QWEN3, "fsdp2.tp2.ep2.etp2", "tp4", FUSED),
    (QWEN3, "fsdp4.ep2", "tp4.ep4", FUSED),
    (QWEN3, "tp4.etp4", "tp4.ep2", {}),
    (experts_shape(MIXTRAL), "pp2.fsdp2.ep2", "dp2.tp2", FUSED),
    (DEEPSEEK, "fsdp4.ep2.etp2", "tp2", FUSED),
    (DEEPSEEK, "dp2.fsdp2", "tp2.ep2", {"gate_up_proj": FUSED["gate_up_proj"]}),
]


@pytest.mark.parametrize(("shape", "run", "far", "fused"), CASES, ids=[f"{case[1]}-{case[2]}" for case in CASES])
def test_every_element_arrives_once_in_its_place(shape, run, far, fused):
    plan = published(shape, run, far, fused=fused)
    parts = [plan.part(holder) for holder in range(plan.holders)]
    assert judge_all(plan.engine.catalogue, plan.old, plan.new, parts).problems == ()
    arriving = by_rank(plan, range(plan.first))
    assert judge_deliveries(plan.engine, arriving) == ()
    right = values(shape)
    for rank in plan.engine.ranks:
        made = {name: np.full(sizes, -1) for name, sizes in plan.engine.local_shapes(rank).items()}
        for one in arriving[rank]:
            logical = plan.engine.catalogue[one.move.tensor]
            part = right[logical.name][within(one.move.box, whole(logical.shape))]
            part = part[0] if one.transform.apart else part
            room = made[one.tensor][tuple(slice(*ends) for ends in one.place)]
            room[...] = part.T if one.transform.transposed else part
        wanted = expected(shape, plan, rank)
        assert made.keys() == wanted.keys()
        for name, value in wanted.items():
            assert np.array_equal(made[name], value), name


def test_the_engine_has_the_names_and_shapes_that_vllm_fuses():
    plan = published(LLAMA, "fsdp2", "tp2")
    shapes = plan.engine.local_shapes(0)
    layer = "model.layers.0"
    assert shapes[f"{layer}.self_attn.qkv_proj.weight"] == (32 + 16 + 16, 64)
    assert shapes[f"{layer}.self_attn.o_proj.weight"] == (64, 32)
    assert shapes[f"{layer}.mlp.gate_up_proj.weight"] == (96, 64)
    assert shapes[f"{layer}.mlp.down_proj.weight"] == (64, 48)
    assert shapes["model.embed_tokens.weight"] == (31, 64)
    assert plan.engine.local_shapes(1)["lm_head.weight"] == (30, 64)
    assert plan.engine.whole_shapes()[f"{layer}.self_attn.qkv_proj.weight"] == (128, 64)
    assert not any("q_proj" in name or "gate_proj" in name for name in shapes)
    plain = published(LLAMA, "fsdp2", "tp2", fused={}).engine.local_shapes(0)
    assert plain[f"{layer}.self_attn.k_proj.weight"] == (16, 64)


def test_experts_are_stacked_as_vllm_and_sglang_have_them():
    shapes = published(QWEN3, "fsdp4.ep4", "tp2").engine.local_shapes(1)
    assert shapes["model.layers.1.mlp.experts.w13_weight"] == (8, 2 * 48 // 2, 64)
    assert shapes["model.layers.1.mlp.experts.w2_weight"] == (8, 64, 48 // 2)
    assert shapes["model.layers.1.mlp.gate.weight"] == (8, 64)
    dealt = published(QWEN3, "fsdp4.ep4", "tp4.ep2").engine
    assert dealt.local_shapes(3)["model.layers.1.mlp.experts.w13_weight"] == (8 // 2, 2 * 48 // 2, 64)
    assert dealt.whole_shapes()["model.layers.1.mlp.experts.w13_weight"] == (8, 2 * 48, 64)
    plan = published(QWEN3, "dp1", "tp2")
    up = [tensor.name for tensor in plan.engine.catalogue].index("layers.1.mlp.experts.up_proj")
    places = [one.place for one in by_rank(plan, [0])[1] if one.move.tensor == up]
    assert places == [((0, 8), (24, 48), (0, 64))]  # of every expert behind its rows of the gate
    mixtral = published(experts_shape(MIXTRAL), "dp1", "tp2").engine.local_shapes(0)
    assert mixtral["model.layers.0.block_sparse_moe.experts.w2_weight"] == (6, 64, 48)
    latent = published(DEEPSEEK, "dp1", "tp2").engine
    assert latent.local_shapes(0)["model.layers.1.self_attn.fused_qkv_a_proj.weight"] == (24 + 20 + 8, 64)
    assert latent.local_shapes(0)["model.layers.1.mlp.shared_experts.gate_up_proj.weight"] == (2 * 2 * 32 // 2, 64)


@pytest.mark.parametrize("shape", [LLAMA, GPT2, QWEN3, experts_shape(MIXTRAL), DEEPSEEK])
def test_an_engine_that_fuses_nothing_has_what_the_files_have(shape):
    plan = published(shape, "dp1", "dp1", fused={})
    assert plan.engine.whole_shapes() == plan.engine.local_shapes(0) == file_shapes(shape)
    made = {name: np.full(sizes, -1) for name, sizes in file_shapes(shape).items()}
    for name, parts in file_parts(shape).items():
        for part in parts:
            value = values(shape)[name][within(part.box, whole(values(shape)[name].shape))]
            value = value.T if part.transposed else value
            room = made[part.tensor][tuple(slice(*ends) for ends in part.file_box)]
            room[...] = value.reshape(room.shape)
    wanted = expected(shape, plan, 0)
    assert wanted.keys() == made.keys()
    assert all(np.array_equal(wanted[name], value) for name, value in made.items())


def test_a_routers_bias_has_thirty_two_bits_whatever_the_rest_has():
    plan = published(DEEPSEEK, "fsdp2", "tp2")
    casts = {one.tensor: one.transform.cast for one in by_rank(plan, [0, 1])[1]}
    found = {name for name, cast in casts.items() if cast != "bfloat16"}
    assert found == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}
    assert {casts[name] for name in found} == {"float32"}
    assert not any("tokens_per_expert" in name for name in casts)


def test_a_run_of_hugging_faces_names_is_the_same_engine():
    ours = catalogue(LLAMA, optimizer="")
    theirs = tuple(
        replace(tensor, name=tensor.name if tensor.name == "lm_head.weight" else f"model.{tensor.name}")
        for tensor in ours
    )
    one, other = (Engine.of(LLAMA, "tp2", held) for held in (ours, theirs))
    assert [one.local_shapes(rank) for rank in (0, 1)] == [other.local_shapes(rank) for rank in (0, 1)]
    theirs = tuple(
        replace(tensor, name=tensor.name if tensor.name == "lm_head.weight" else f"model.{tensor.name}")
        for tensor in catalogue(QWEN3, optimizer="")
    )
    one, other = (Engine.of(QWEN3, "tp2", held) for held in (catalogue(QWEN3, optimizer=""), theirs))
    assert one.local_shapes(1) == other.local_shapes(1)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda one: replace(one, place=((0, 1), *one.place[1:])), "its place is"),
        (lambda one: replace(one, transform=Transform("bfloat16", transposed=True)), "wrong way round"),
        (lambda one: replace(one, transform=Transform("float16")), "cast"),
        (lambda one: replace(one, transform=Transform("e8")), "cast"),
        (lambda one: replace(one, transform=Transform("bfloat16", apart=True)), "dim of the experts is gone"),
        (lambda one: replace(one, tensor="model.norm.weight"), "is no part of it"),
    ],
)
def test_the_judge_sees_a_delivery_that_goes_astray(fault, says):
    plan = published(LLAMA, "fsdp4", "tp2")
    arriving = by_rank(plan, range(plan.first))
    at = next(i for i, one in enumerate(arriving[1]) if one.tensor.endswith("qkv_proj.weight"))
    arriving[1][at] = fault(arriving[1][at])
    assert any(says in problem for problem in judge_deliveries(plan.engine, arriving))


def test_the_judge_sees_what_is_missing_and_what_comes_twice():
    plan = published(LLAMA, "fsdp4", "tp2")
    arriving = by_rank(plan, range(plan.first))
    assert "missing" in judge_deliveries(plan.engine, arriving | {0: arriving[0][:-1]})[0]
    assert "twice" in judge_deliveries(plan.engine, arriving | {1: [*arriving[1], arriving[1][0]]})[0]


def test_what_a_rank_holds_for_a_publish_is_what_it_sends_in_the_engines_dtype():
    plan = published(LLAMA, "fsdp4", "dp2.tp2")
    sent = [plan.deliveries(plan.part(holder).sends) for holder in range(plan.first)]
    elements = sum(int(np.prod(tensor.shape)) for tensor in plan.engine.catalogue)
    assert sum(map(copied_bytes, sent)) == 2 * elements  # two replicas get the same copies
    for its in sent:
        assert predicted_bytes(its, plan.rounds(its), changes=False) == copied_bytes(its)
        more = predicted_bytes(its, plan.rounds(its), changes=True) - 2 * copied_bytes(its)
        assert 0 < more <= 4 * (1 << 14)


@pytest.mark.parametrize(
    ("layout", "options", "says"),
    [
        ("fsdp2", {}, "an engine's axes are"),
        ("tp3", {}, "not legal"),
        ("tp2.ep2", {}, "not legal"),
        ("tp2", {"dtype": "int8"}, "dtype is 'int8'"),
        ("tp2", {"fused": {"both": ("q_proj", "z_proj")}}, "self_attn.z_proj.weight, which the model has not"),
    ],
)
def test_what_no_engine_is_is_refused_with_the_rule(layout, options, says):
    with pytest.raises((LayoutError, ModelError), match=says):
        Engine.of(LLAMA, layout, catalogue(LLAMA), **options)


@pytest.mark.parametrize(
    ("layout", "options", "says"),
    [
        ("tp4.etp2", {}, "etp2: each expert is cut over what ep leaves of tp, 4 rank"),
        ("dp2.ep2", {}, "does not divide the 1 ranks"),
        ("tp16.ep16", {}, "does not divide the experts, 8"),
        ("tp2", {"fused": {"experts.w": ("gate_proj", "z_proj")}}, "experts.z_proj, which the model has not"),
    ],
)
def test_what_no_engine_does_to_experts_is_refused_with_the_rule(layout, options, says):
    with pytest.raises((LayoutError, ModelError), match=says):
        Engine.of(QWEN3, layout, catalogue(QWEN3), **options)


def test_tensors_of_another_model_are_refused_by_name():
    other = catalogue(small_shape(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=16))
    with pytest.raises(ModelError, match=r"layers.0.self_attn.q_proj.weight of shape \[128, 64\]"):
        Engine.of(LLAMA, "tp2", other)
    with pytest.raises(ModelError, match="the run has no tensor norm"):
        Engine.of(LLAMA, "tp2", tuple(one for one in catalogue(LLAMA) if one.name != "norm.weight"))


def test_the_judge_sees_an_expert_in_the_place_of_another():
    plan = published(QWEN3, "fsdp4.ep4", "tp2", fused={})
    arriving = by_rank(plan, range(plan.first))
    found = [i for i, one in enumerate(arriving[0]) if re.search(r"experts\.[01]\.gate_proj", one.tensor)]
    one, other = (arriving[0][at] for at in found[:2])
    arriving[0][found[0]], arriving[0][found[1]] = replace(one, move=other.move), replace(other, move=one.move)
    assert sum("is no part of it" in problem for problem in judge_deliveries(plan.engine, arriving)) == 2


@pytest.mark.parametrize(
    ("run", "far", "rate", "most"),
    [
        ("fsdp4", "tp2", 0, 1 << 14),
        ("fsdp4", "tp2", 1e9, 1 << 14),
        ("fsdp4", "tp2", 100.0, 4000),
        ("fsdp4", "dp2.tp2", 100.0, 2000),
        ("pp2.fsdp2", "tp2", 100.0, 2000),
        ("dp2.tp2", "tp2", 100.0, 2000),
        ("dp1", "tp2", 1e-3, 1),
    ],
)
def test_a_round_is_as_small_as_its_call_is_to_be_short(run, far, rate, most):
    assert round_bytes_at(rate, parse_layout(run), parse_layout(far), 1 << 14) == most


@pytest.mark.parametrize(
    ("run", "far"), [("fsdp4", "tp2"), ("fsdp2.tp2", "dp2.tp2"), ("pp2.dp2", "tp2"), ("dp4", "dp1")]
)
def test_at_a_low_rate_no_call_waits_longer_for_a_rank_than_that_and_for_one_tensor_more(run, far):
    rate, held = 1000.0, catalogue(LLAMA)
    ownership = declared(held, resolve(parse_layout(run), LLAMA.num_hidden_layers), LLAMA.num_hidden_layers)
    options = {"config": LLAMA.to_config(), "layout": far, "dtype": "fp32", "mib_per_second": rate / (1 << 20)}
    world = SimpleNamespace(catalogue=held, ownership=ownership)
    publisher = Publisher(SimpleNamespace(rank=0))
    plan = publisher._draw(world, EngineTarget(engine="x", **options), _Known()).publication
    largest = max(4 * math.prod(tensor.shape) for tensor in plan.engine.catalogue)

    sent = [
        4 * sum(volume(one.place) for its in of_round.values() for one in its)
        for holder in range(plan.first)
        for of_round in plan.rounds(plan.deliveries(plan.part(holder).sends))
    ]

    assert max(sent) <= CALL_SECONDS * rate + largest
