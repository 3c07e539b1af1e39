"""Rows sent to experts on other ranks: outputs, gradients and loads are those of one process that holds everything."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from tests.jobs import everywhere
from tests.shapes import DEEPSEEK, experts_shape
from torch import nn

from dynatrain.models.expert_groups import ExpertGroups
from dynatrain.models.experts import MixtureOfExperts
from dynatrain.models.initial import initial_box
from dynatrain.models.keyed import KeyedStream
from dynatrain.space.box import whole

SIZES = replace(DEEPSEEK, n_shared_experts=0, first_k_dense_replace=0, router_aux_loss_coef=0.1)
SHAPE = experts_shape(SIZES)


@dataclass(frozen=True)
class Mix:
    """4 ranks as (efsdp, ep, etp); ``spread``: each two neighbours share sequences, else each has its own."""

    ep: int
    etp: int
    spread: bool = False


MIXES = [Mix(*sizes) for sizes in product((1, 2, 4), (1, 2, 4)) if 1 < sizes[0] * sizes[1] <= 4]
MIXES += [Mix(2, 2, spread=True), Mix(4, 1, spread=True)]


def block_of(exchange=None):
    block = MixtureOfExperts(SHAPE, None, KeyedStream(seed=0)).double()
    for name, value in block.named_parameters():
        value.data = initial_box(3, name, value.shape, whole(value.shape), rule=0.3, dtype=torch.float64)
    block.gate.e_score_correction_bias[:2] -= 10  # nobody is sent there: a rank of ep 4 has nothing to do
    block.exchange = exchange or block.exchange
    return block


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 6, 64, dtype=torch.float64, generator=generator)


def tokens_of(rank, mix, x):
    """This rank's part of [4, T, ...]: one sample, or half of the tokens of two."""
    return x[rank // 2 * 2 : rank // 2 * 2 + 2, rank % 2 * 3 : rank % 2 * 3 + 3] if mix.spread else x[rank : rank + 1]


def slices(rank, mix):
    """This rank's experts, and its part of their width."""
    each, width = SIZES.num_experts // mix.ep, SIZES.moe_intermediate_size // mix.etp
    at, part = rank // mix.etp % mix.ep, rank % mix.etp
    return slice(at * each, at * each + each), slice(part * width, part * width + width)


def groups_of(world, size, step):
    """This rank's group of ``size`` ranks that are ``step`` apart."""
    mine = None
    for first in range(4):
        if first // step % size == 0:
            members = [first + step * i for i in range(size)]
            group = dist.new_group(members)
            mine = group if world.rank in members else mine
    return mine


def computed(world):
    """Of each mix: output, gradients and counters of this rank."""
    found = {}
    for mix in MIXES:
        ep, etp = groups_of(world, mix.ep, mix.etp), groups_of(world, mix.etp, 1)
        pairs = [groups_of(world, 2, 1)] if mix.spread else []
        block = block_of(ExpertGroups(ep, etp if mix.etp > 1 else None, pairs))
        experts, width = slices(world.rank, mix)
        for name, at in (("gate_proj", (experts, width)), ("up_proj", (experts, width))):
            setattr(block.experts, name, nn.Parameter(getattr(block.experts, name).data[at].clone()))
        down = block.experts.down_proj.data[experts, :, width]
        block.experts.down_proj = nn.Parameter(down.clone())
        x = tokens_of(world.rank, mix, batch()).clone().requires_grad_()
        out = block(x, torch.arange(len(x)))
        (out * tokens_of(world.rank, mix, batch()).cos()).sum().backward()
        gradients = {name: value.grad for name, value in block.named_parameters()}
        found[mix] = out.detach(), x.grad, gradients, block.gate.tokens_per_expert
    return found


@pytest.fixture(scope="module")
def found():
    return everywhere(4, computed, 120)


@pytest.fixture(scope="module")
def alone():
    block, x = block_of(), batch().requires_grad_()
    out = block(x, torch.arange(4))
    (out * batch().cos()).sum().backward()
    gradients = {name: value.grad for name, value in block.named_parameters()}
    return out.detach(), x.grad, gradients, block.gate.tokens_per_expert


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_every_rank_has_the_outputs_and_gradients_of_its_tokens(found, alone, mix):
    for rank, result in enumerate(found):
        for mine, whole_of_it in zip(result[mix][:2], alone[:2], strict=True):
            torch.testing.assert_close(mine, tokens_of(rank, mix, whole_of_it), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_gradients_of_experts_add_up_over_the_ranks_that_hold_them_and_of_routers_over_all(found, alone, mix):
    total = {name: torch.zeros_like(value) for name, value in alone[2].items()}
    for rank, result in enumerate(found):
        experts, width = slices(rank, mix)
        for name, value in result[mix][2].items():
            at = {"gate.weight": (), "experts.down_proj": (experts, slice(None), width)}.get(name, (experts, width))
            total[name][at] += value

    for name, value in total.items():
        torch.testing.assert_close(value, alone[2][name], rtol=0, atol=1e-12)
    assert torch.equal(sum(result[mix][3] for result in found), alone[3])


def test_a_rank_without_a_row_takes_part(alone):
    """Else the cases above would not show that nobody waits for it."""
    assert alone[3][:2].tolist() == [0, 0]
    assert alone[3][2:].min() > 0
    assert not alone[2]["experts.gate_proj"][:2].any()
