"""Experts that the run deals out come to an engine that stacks them over tp, or has each apart; bit by bit."""

import pytest
import torch
from tests import oracle
from tests.dist import foreign
from tests.dist.test_publish import TOKENS
from tests.engines import Folder, Listening, ask, engine, right_digests, whole_weights
from tests.jobs import Case, everywhere, switcher
from tests.recipes import load
from tests.shapes import QWEN3_MOE, experts_shape, latent_shape

from dynatrain.space.box import whole, within
from dynatrain.space.hf_names import file_parts, file_shapes
from dynatrain.train.publisher import EngineTarget
from dynatrain.train.trainer import Trainer

QWEN3 = experts_shape(QWEN3_MOE, dropout=0.0, qk_norm=True)
DEEPSEEK = latent_shape(dropout=0.0, router_aux_loss_coef=0.1)


def publishes(world, shape, tour, target):
    """A step in each layout, and a publish behind it: of each ``(published, whole weights)``."""
    case = Case(tour=tour, size=2, steps_each=1, shape=shape, compute="fp32", micro_batches=2)
    job, ends = case.job(), []
    sw = switcher(job, world, tour[0])
    for step, layout in enumerate(tour[1:], 1):
        sw.request(layout, at=step)
    trainer = Trainer(job, case.data(), sw, lambda _: None)
    for step in range(len(tour)):
        trainer.run(step + 1)
        ends.append((sw.publish(target).wait(), whole_weights(sw)))
    return ends


def test_experts_in_any_layout_are_served_by_an_engine_that_cuts_each_over_tp(tmp_path):
    tour = ("fsdp2.ep2", "tp2.etp2", "fsdp2")

    def work(world, url):
        client = Listening(url)
        target = EngineTarget(engine=client, config=QWEN3.to_config(), layout="tp2", round_bytes=1 << 16)
        ends = publishes(world, QWEN3, tour, target)
        return ends, client.digests, [body for path, body in client.calls if path == "finish_weight_update"]

    with engine(tmp_path, QWEN3, tp=2, dtype="bfloat16") as url:
        ends, digests, finished = everywhere(2, lambda world: work(world, url))[0]
        scores = ask(url, "score", tokens=TOKENS)["log_probabilities"]
    assert [done.version for done, _ in ends] == [1, 2, 3]
    assert finished == [{"weight_version": text} for text in "123"]  # all that vLLM's server takes there
    for (done, weights), told in zip(ends, digests, strict=True):
        assert told == right_digests(QWEN3, "tp2", weights, torch.bfloat16)
        assert all(0 < measured <= predicted for measured, predicted in zip(done.measured, done.predicted, strict=True))
        assert max(done.measured) < 1.3 * sum(value.numel() for value in weights.values())  # half of it, in two bytes
    rounded = {name: value.bfloat16().float() for name, value in ends[-1][1].items()}
    with torch.no_grad():
        logits = oracle.logits(rounded, QWEN3, torch.tensor([0]), torch.tensor(TOKENS), "")
    right = logits.log_softmax(-1)[:, :-1].gather(2, torch.tensor(TOKENS)[:, 1:, None]).squeeze(2)
    assert scores[0] == pytest.approx(right[0].tolist(), abs=1e-5)


def test_an_engine_that_fuses_nothing_gets_every_tensor_of_the_files_each_expert_apart():
    """DeepSeek's form: experts behind a dense layer, latents, and a router's bias that keeps its 32 bits."""
    tour = ("fsdp2.ep2", "tp2.etp2")

    def work(world):
        folder, got = Folder(), []
        target = EngineTarget(engine=folder, config=DEEPSEEK.to_config(), fused={}, round_bytes=1 << 16)
        for _, weights in publishes(world, DEEPSEEK, tour, target):
            got.append((folder.tensors, weights))
        return got[-1]

    tensors, weights = everywhere(2, work)[0]
    assert {name: tuple(value.shape) for name, value in tensors.items()} == file_shapes(DEEPSEEK)
    for name, parts in file_parts(DEEPSEEK).items():
        for part in parts:
            got, value = tensors[part.tensor], weights[name][within(part.box, whole(tuple(weights[name].shape)))]
            kind = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
            assert got.dtype == kind
            assert torch.equal(got, value.to(kind).view(got.shape)), part.tensor
            assert got.any()


def test_a_model_of_transformers_with_gate_and_up_in_one_is_published_alike_from_fsdp_and_from_tp():
    def work(world):
        recipe = load(world, "hf_models")
        torch.manual_seed(0)
        build = recipe["make_build"](recipe["MODELS"]["qwen3_moe"])
        more = {"segments": recipe["SEGMENTS"]["qwen3_moe"], "data_parallel": "free"}
        sw = foreign.switcher(world, build, "fsdp2", recorder=(books := foreign.Books()), **more)
        weights = {name: foreign.whole(value) for name, value in sw.model.named_parameters()}
        config = sw.model.config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
        target = EngineTarget(engine=(folder := Folder()), config=config, fused={}, dtype="fp32")
        sw.publish(target).wait()
        got = [folder.tensors]
        sw.request("tp2")
        ends = foreign.until_ended(sw, books)
        sw.publish(target).wait()
        return ends, [*got, folder.tensors], weights

    ends, (first, then), weights = foreign.everywhere(2, work)[0]
    assert ends == [("tp2", "committed", "")]
    wanted = {}
    for name, value in weights.items():
        module, _, last = name.rpartition(".")
        if not module.endswith(".experts"):
            wanted[name] = value.float()
            continue
        for number, one in enumerate(value.float()):
            parts = dict(zip(("gate_proj", "up_proj"), one.chunk(2), strict=True)) if "gate" in last else {last: one}
            wanted |= {f"{module}.{number}.{part}.weight": matrix for part, matrix in parts.items()}
    for got in (first, then):
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], value) for name, value in wanted.items())
