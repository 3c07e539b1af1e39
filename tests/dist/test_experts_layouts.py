"""Experts, latents and what balances the load are the oracle's, however the axes factor the ranks."""

from dataclasses import replace

import pytest
import torch.distributed as dist
from tests.dist.test_same_numbers import furthest
from tests.jobs import Case, everywhere, switcher
from tests.shapes import QWEN3_MOE, experts_shape, latent_shape

from dynatrain.models.experts import MixtureOfExperts
from dynatrain.train.torch_private import local_tensor

SHAPE = latent_shape(router_aux_loss_coef=0.1)
PLAIN = experts_shape(replace(QWEN3_MOE, router_aux_loss_coef=0.1), num_key_value_heads=4, qk_norm=True)
"""Softmax gate, no shared expert, grouped-query attention."""

TOURS = {
    "dealt out": (SHAPE, ("fsdp4.ep4", "fsdp2.tp2.ep2", "fsdp4")),
    "stages and contexts": (SHAPE, ("pp2.fsdp2.ep2", "fsdp2.cp2-ring.ep2.etp2")),
}
LONG = {
    "softmax": (PLAIN, ("fsdp2.tp2.ep2.etp2", "cp2-ulysses.fsdp2.ep2", "tp4-sp.ep4")),
    "etp is not tp": (SHAPE, ("tp4.ep2", "dp2.fsdp2.ep2", "fsdp2.tp2-sp.etp2", "cp2.tp2.ep4")),
    "latents in context": (SHAPE, ("cp4", "cp2.tp2-sp", "cp4-ring.ep2", "cp4-ulysses.etp4", "dp2.cp2.ep2")),
    "softmax, everywhere": (PLAIN, ("dp4", "fsdp4.etp4", "tp4.etp2", "pp2.tp2.ep2", "dp2.tp2-sp.ep2", "fsdp4-z1.ep2")),
}


@pytest.mark.parametrize("name", [*TOURS, *(pytest.param(name, marks=pytest.mark.sweep) for name in LONG)])
def test_every_mix_of_axes_is_the_oracles_run(name):
    shape, tour = (TOURS | LONG)[name]

    assert max(furthest(Case(tour=tour, shape=shape))) <= 1e-12


def test_three_ranks_share_four_micro_batches_unevenly_and_route_as_one():
    """The third rank's share is filled up with what no router may count."""
    case = Case(tour=("fsdp3", "pp3", "dp3"), size=3, steps_each=2, shape=SHAPE, micro_batches=4)

    assert max(furthest(case)) <= 1e-12


def test_a_rank_holds_its_share_of_the_experts_and_no_more():
    def work(world):
        found = {}
        for layout in ("fsdp4.ep4", "fsdp4.ep2.etp2", "fsdp4"):
            sw = switcher(Case(tour=(layout,), shape=PLAIN).job(), world, layout)
            blocks = [module for module in sw.model.modules() if isinstance(module, MixtureOfExperts)]
            found[layout] = sum(local_tensor(value).numel() for block in blocks for value in block.experts.parameters())
            sw.close()
            dist.barrier()
        return found

    sizes = PLAIN.experts
    whole = PLAIN.num_hidden_layers * 3 * sizes.num_experts * sizes.moe_intermediate_size * PLAIN.hidden_size
    for rank in everywhere(4, work):
        assert set(rank.values()) == {whole // 4}
