"""Experts and latent attention against plain torch, and what keeps the load of experts even."""

import itertools
from dataclasses import replace

import pytest
import torch
from tests import oracle, oracle_experts
from tests.shapes import DEEPSEEK, MIXTRAL, QWEN3_MOE, experts_shape, fill, latent_shape, random_batch
from tests.unit.test_decoder import weights_of, whole_part
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dynatrain.models import experts as module
from dynatrain.models.decoder import DecoderPart
from dynatrain.models.experts import Exchange, GroupedExperts, MixtureOfExperts
from dynatrain.models.keyed import KeyedStream
from dynatrain.models.routing import Router, balance, balance_loss
from dynatrain.space.blocks import Experts
from dynatrain.train.optimizer import OptimizerSettings, optimizer_of

SHAPES = {
    "mixtral": experts_shape(MIXTRAL),
    "qwen3 moe, with the loss": experts_shape(replace(QWEN3_MOE, router_aux_loss_coef=0.1), qk_norm=True),
    "deepseek v3, with the loss": latent_shape(router_aux_loss_coef=0.1),
    "kimi k2, tied": latent_shape(n_group=1, topk_group=1, tie_word_embeddings=True),
    "one expert of all, without a shared one": latent_shape(num_experts_per_tok=1, n_shared_experts=0),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def held(part):
    return weights_of(part) | {name: value.clone() for name, value in part.named_buffers()}


def sizes_of(**changes):
    return replace(Experts(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8), **changes)


@shapes
def test_training_of_a_whole_part_equals_the_oracle(shape):
    """Two steps of two micro-batches: losses, weights, moments, and the biases that balance the load."""
    part = whole_part(shape)
    start, optimizer, losses = held(part), optimizer_of(part, OptimizerSettings()), []
    batches = [random_batch(shape, step, micro_batches=2, samples=2, tokens=8) for step in range(2)]
    for step, batch in enumerate(batches):
        part.streams.step, part.streams.token_weight = step, 1 / (2 * 2 * 8)
        losses.append(0.0)
        for samples, inputs, targets in batch:
            out = part(inputs, samples).flatten(0, 1)
            share = functional.cross_entropy(out, targets.flatten(), reduction="sum") / (2 * 2 * 8)
            share.backward()
            losses[-1] += share.item()
        nn.utils.clip_grad_norm_(part.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        optimizer.step()
        optimizer.zero_grad()
        balance(part, lambda counts: counts, oracle_experts.RATE)

    expected = list(oracle.train(start, shape, batches, seed=5, rate=1e-2, warmup=0, steps=1 << 40, clip=0.5))
    _, weights, moments = expected[-1]

    assert losses == pytest.approx([loss for loss, _, _ in expected], abs=1e-12)
    for name, value in held(part).items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-12)
        assert name.endswith("tokens_per_expert") or (value != start[name]).any(), name
    for name, value in part.named_parameters():
        torch.testing.assert_close(optimizer.state[value]["exp_avg"], moments[name]["exp_avg"], rtol=0, atol=1e-12)


def test_the_loss_changes_the_gradient_of_routers_and_what_is_before_them_alone():
    shape = latent_shape(router_aux_loss_coef=0.1, dropout=0.0)
    ((samples, inputs, targets),) = random_batch(shape, 0, micro_batches=1, samples=2, tokens=12)
    gradients = {}
    for weight in (0.0, 1.0):
        part = whole_part(shape)
        part.streams.token_weight = weight
        functional.cross_entropy(part(inputs, samples).flatten(0, 1), targets.flatten()).backward()
        gradients[weight] = {name: value.grad for name, value in part.named_parameters()}

    same = {name for name, value in gradients[0.0].items() if torch.equal(value, gradients[1.0][name])}
    last = "layers.2.mlp."
    after = {f"{last}experts.{n}_proj" for n in ("gate", "up", "down")}
    after |= {f"{last}shared_experts.{n}_proj.weight" for n in ("gate", "up", "down")} | {
        "norm.weight",
        "lm_head.weight",
    }
    assert same == after


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts_are_experts_one_by_one(dtype, monkeypatch):
    """Forward and backward, with an expert that nothing is sent to."""
    torch.manual_seed(0)
    sizes = sizes_of(num_experts=4, moe_intermediate_size=24)
    experts = GroupedExperts(16, sizes).to(dtype)
    rows, counts = torch.randn(13, 16, dtype=dtype), torch.tensor([5, 0, 7, 1])
    asked, found = [], {}
    grouped = module.functional.grouped_mm
    monkeypatch.setattr(module.functional, "grouped_mm", lambda *args, **kw: asked.append(1) or grouped(*args, **kw))
    for way in ("grouped", "one by one"):
        x = rows.clone().requires_grad_()
        out = experts(x, counts)
        (out * torch.linspace(-1, 1, 16, dtype=dtype)).sum().backward()
        found[way] = [out.detach(), x.grad, *(value.grad.clone() for value in experts.parameters())]
        experts.zero_grad()
        monkeypatch.setattr(module, "_can_group", lambda *_: False)

    assert len(asked) == 3
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_experts_that_nothing_is_sent_to_have_gradients_of_zero(dtype):
    """A rank's experts take part in the reduction of gradients also in such a step."""
    experts = GroupedExperts(16, sizes_of()).to(dtype)
    rows = torch.zeros(0, 16, dtype=dtype, requires_grad=True)
    experts(rows, torch.zeros(6, dtype=torch.int64)).sum().backward()

    assert rows.grad.shape == (0, 16)
    assert all(value.grad is not None and not value.grad.any() for value in experts.parameters())


@pytest.mark.parametrize(("dtype", "width", "can"), [
    (torch.float64, 24, False), (torch.float32, 24, True), (torch.float32, 22, False), (torch.bfloat16, 12, False),
])  # fmt: skip
def test_torch_groups_what_its_kernels_take(dtype, width, can):
    experts = GroupedExperts(16, sizes_of(moe_intermediate_size=width)).to(dtype)

    assert module._can_group(torch.zeros(3, 16, dtype=dtype), experts.gate_proj) == can
    assert experts(torch.zeros(3, 16, dtype=dtype), torch.tensor([1, 0, 2, 0, 0, 0])).shape == (3, 16)


def test_the_exchange_gets_rows_by_global_expert_and_its_outputs_come_back_to_their_tokens():
    """Experts that return their own number times the row: a swap of two of them, or of two rows, shows."""

    class Numbered(Exchange):
        def run(self, experts, rows, counts):
            del experts
            self.seen = rows, counts
            return rows * torch.arange(len(counts)).repeat_interleave(counts)[:, None]

    block = MixtureOfExperts(experts_shape(MIXTRAL), None, KeyedStream(seed=0)).double()
    block.exchange = Numbered()
    x = torch.randn(2, 7, 64, dtype=torch.float64)
    _, chosen, weights = block.gate(x)

    out = block(x, torch.arange(2))
    torch.testing.assert_close(out, x * (chosen * weights).sum(-1, keepdim=True), rtol=0, atol=1e-12)
    rows, counts = block.exchange.seen
    assert counts.tolist() == [(chosen == expert).sum().item() for expert in range(6)]
    assert len(rows) == counts.sum() == 2 * 7 * 2


def test_a_token_chooses_from_its_best_groups_by_biased_scores_and_is_weighed_by_plain_ones():
    sizes = sizes_of(gate="sigmoid", n_group=3, topk_group=1, routed_scaling_factor=2.0)
    router = Router(6, sizes).double()
    wanted = torch.tensor([[0.9, 0.1, 0.5, 0.6, 0.4, 0.3]], dtype=torch.float64)
    router.weight.data = torch.eye(6, dtype=torch.float64)

    _, chosen, weights = router(wanted.logit()[None])
    assert chosen.tolist() == [[[2, 3]]]  # 0.5 + 0.6 is more than 0.9 + 0.1
    torch.testing.assert_close(weights, torch.tensor([[[1.0, 1.2]]], dtype=torch.float64) / 1.1)
    router.e_score_correction_bias[4:] = 1.0
    _, chosen, weights = router(wanted.logit()[None])
    assert chosen.tolist() == [[[4, 5]]]
    torch.testing.assert_close(weights, torch.tensor([[[0.8, 0.6]]], dtype=torch.float64) / 0.7)


def test_logits_and_scores_are_wide_also_where_the_rest_is_not():
    router = Router(64, MIXTRAL).bfloat16()
    x = torch.randn(1, 5, 64).bfloat16()
    scores, _, _ = router(x)

    assert scores.dtype == torch.float32
    assert torch.equal(scores, functional.linear(x.float(), router.weight.float()).softmax(-1))


def test_an_even_load_has_a_balance_loss_of_one_for_each_token_and_an_uneven_one_more():
    even = torch.full((2, 6, 3), 1 / 3)
    counts = torch.tensor([[4, 4, 4], [4, 4, 4]])

    assert balance_loss(even, counts).item() == pytest.approx(12)
    one_sided = torch.tensor([0.8, 0.1, 0.1]).expand(2, 6, 3)
    assert balance_loss(one_sided, torch.tensor([[12, 0, 0]] * 2)).item() == pytest.approx(12 * 3 * 0.8)


def test_the_balance_loss_of_a_part_of_the_tokens_is_its_part_of_the_whole():
    """So it adds up over ranks that share sequences, once they know the counts of the whole."""
    scores = torch.rand(2, 8, 4, dtype=torch.float64)
    counts = torch.tensor([[3, 9, 1, 3], [4, 4, 8, 0]])
    parts = sum(balance_loss(scores[:, at : at + 2], counts) for at in range(0, 8, 2))

    torch.testing.assert_close(parts, balance_loss(scores, counts), rtol=0, atol=1e-12)


def test_what_fills_a_batch_up_is_not_counted_and_has_no_balance_loss():
    shape = latent_shape(router_aux_loss_coef=0.1, dropout=0.0)
    ((samples, inputs, _),) = random_batch(shape, 0, micro_batches=1, samples=2, tokens=12)
    found = []
    for numbers, tokens in ((samples[:1], inputs[:1]), (torch.stack((samples[0], torch.tensor(-1))), inputs)):
        part = whole_part(shape)
        out = part(tokens, numbers)
        (out[:1] ** 2).sum().backward()
        found.append({n: v.grad for n, v in part.named_parameters()} | dict(part.named_buffers()))

    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=0, atol=1e-12)
    assert found[0]["layers.1.mlp.gate.tokens_per_expert"].sum() == 12 * 3


def test_tokens_are_counted_once_in_training_also_where_forward_is_repeated_and_never_without_backward():
    shape = latent_shape()
    part = whole_part(shape)
    ((samples, inputs, _),) = random_batch(shape, 0, micro_batches=1, samples=2, tokens=12)
    counters = part.layers["1"].mlp.gate.tokens_per_expert
    with torch.no_grad():
        part(inputs, samples)
    part.eval()(inputs, samples)
    assert counters.sum() == 0
    x = part.embed_tokens(inputs)
    checkpoint(part.layers["1"], x, samples, use_reentrant=False).sum().backward()

    assert counters.sum() == 2 * 12 * 3


def test_the_bias_moves_against_the_summed_load_by_its_sign_and_the_counters_begin_anew():
    shape = latent_shape()
    part = whole_part(shape)
    routers = [block.mlp.gate for block in list(part.layers.values())[1:]]
    for router in routers:
        router.tokens_per_expert += torch.tensor([9, 1, 5, 5, 5, 5, 5, 5])
    asked = []
    balance(part, lambda counts: asked.append(counts) or counts * 3, 0.25)

    assert [tuple(counts.shape) for counts in asked] == [(2, 8)]
    for router in routers:
        assert router.e_score_correction_bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0]
        assert not router.tokens_per_expert.any()
    balance(whole_part(experts_shape(MIXTRAL)), lambda _counts: 1 / 0, 0.25)  # no bias: nobody is asked


def test_a_bias_evens_an_uneven_load_out():
    torch.manual_seed(0)
    shape = latent_shape(num_experts=6, num_experts_per_tok=2, n_group=1, topk_group=1)
    block = MixtureOfExperts(shape, None, KeyedStream(seed=0)).double()
    x = torch.randn(4, 64, 64, dtype=torch.float64) + torch.randn(64, dtype=torch.float64)
    spread = []
    for _ in range(20):
        block(x, torch.arange(4)).sum().backward()
        counts = block.gate.tokens_per_expert
        spread.append((counts.max() / counts.double().mean()).item())
        balance(block, lambda counts: counts, 0.005)

    assert spread[0] > 1.5
    assert spread[-1] < 1.2


@shapes
def test_parts_in_a_row_are_the_whole_and_have_its_buffers(shape):
    whole, layers = whole_part(shape), shape.num_hidden_layers
    parts = [
        part_of(shape, range(at, end), first=at == 0, last=end == layers)
        for at, end in itertools.pairwise((0, 1, layers))
    ]
    ((samples, inputs, _),) = random_batch(shape, 0, micro_batches=1, samples=2, tokens=16)

    assert torch.equal(parts[1](parts[0](inputs, samples), samples), whole(inputs, samples))
    assert {name for part in parts for name, _ in part.named_buffers()} == {name for name, _ in whole.named_buffers()}


def part_of(shape, layers, **ends):
    part = DecoderPart(shape, layers, streams=KeyedStream(seed=5), **ends).double()
    fill(part, 5)
    return part


def test_initial_weights_tell_experts_apart_and_their_last_projection_starts_smaller():
    part = whole_part(latent_shape(num_hidden_layers=2))
    experts = part.layers["1"].mlp.experts

    assert len({tuple(one.flatten()[:3].tolist()) for one in experts.gate_proj}) == DEEPSEEK.num_experts
    assert experts.down_proj.std().item() == pytest.approx(0.01, rel=0.05)
    assert experts.up_proj.std().item() == pytest.approx(0.02, rel=0.05)
