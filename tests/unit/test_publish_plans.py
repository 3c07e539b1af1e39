"""Plans from a run's layout into an engine's own tensors: every element once, where the engine expects it."""

from dataclasses import replace

import numpy as np
import pytest
from tests.shapes import MIXTRAL, experts_shape, small_shape

from dynatrain.judge.judge import judge_all
from dynatrain.judge.publish import judge_deliveries
from dynatrain.layout.form import LayoutError
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import parse_layout
from dynatrain.plan.plan import Transform
from dynatrain.plan.publish import Publication, copied_bytes, predicted_bytes
from dynatrain.space.box import whole, within
from dynatrain.space.decoder import catalogue
from dynatrain.space.engine import Engine
from dynatrain.space.hf_config import ModelError
from dynatrain.space.ownership import declared

LLAMA = small_shape(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=8)
GPT2 = small_shape(
    family="gpt2", num_key_value_heads=4, num_hidden_layers=4, tie_word_embeddings=True, max_position_embeddings=63
)


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
            if box is not None:
                part = right[one.tensor][within(box, whole(logical[one.tensor].shape))]
                parts.append(part.T if one.transposed else part)
        if parts:
            made[tensor.name] = np.concatenate(parts, axis=tensor.dim)
    return made


CASES = [
    (LLAMA, "fsdp4", "tp2"),
    (LLAMA, "pp2.tp2", "tp4"),
    (LLAMA, "dp2.fsdp2", "dp2.tp2"),
    (LLAMA, "fsdp2.tp2", "tp8"),
    (LLAMA, "pp4", "pp2.tp2"),
    (GPT2, "fsdp4", "tp2"),
    (GPT2, "tp4", "dp1"),
]


@pytest.mark.parametrize(("shape", "run", "far"), CASES, ids=[f"{case[1]}-{case[2]}" for case in CASES])
def test_every_element_arrives_once_in_its_place(shape, run, far):
    plan = published(shape, run, far)
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


def test_a_run_of_hugging_faces_names_is_the_same_engine():
    ours = catalogue(LLAMA, optimizer="")
    theirs = tuple(
        replace(tensor, name=tensor.name if tensor.name == "lm_head.weight" else f"model.{tensor.name}")
        for tensor in ours
    )
    one, other = (Engine.of(LLAMA, "tp2", held) for held in (ours, theirs))
    assert [one.local_shapes(rank) for rank in (0, 1)] == [other.local_shapes(rank) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda one: replace(one, place=((0, 1), *one.place[1:])), "its place is"),
        (lambda one: replace(one, transform=Transform("bfloat16", transposed=True)), "wrong way round"),
        (lambda one: replace(one, transform=Transform("float16")), "cast"),
        (lambda one: replace(one, transform=Transform("e8")), "cast"),
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
        ("tp2", {"dtype": "int8"}, "dtype is 'int8'"),
        ("tp2", {"fused": {"both": ("q_proj", "z_proj")}}, "self_attn.z_proj.weight, which the model has not"),
    ],
)
def test_what_no_engine_is_is_refused_with_the_rule(layout, options, says):
    with pytest.raises((LayoutError, ModelError), match=says):
        Engine.of(LLAMA, layout, catalogue(LLAMA), **options)


def test_tensors_of_another_model_are_refused_by_name():
    other = catalogue(small_shape(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=16))
    with pytest.raises(ModelError, match=r"layers.0.self_attn.q_proj.weight of shape \[128, 64\]"):
        Engine.of(LLAMA, "tp2", other)
    with pytest.raises(ModelError, match="the run has no tensor norm"):
        Engine.of(LLAMA, "tp2", tuple(one for one in catalogue(LLAMA) if one.name != "norm.weight"))
    with pytest.raises(ModelError, match="only dense models"):
        Engine.of(experts_shape(MIXTRAL), "tp2", catalogue(experts_shape(MIXTRAL)))
