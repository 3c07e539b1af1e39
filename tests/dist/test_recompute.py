"""A run that computes its blocks' forward again in backward is the run that keeps everything."""

from dataclasses import replace

import pytest
import torch
from tests.dist.test_same_numbers import furthest
from tests.jobs import Case, everywhere, switcher
from tests.shapes import latent_shape, small_shape
from torch.utils._python_dispatch import TorchDispatchMode

from dynatrain.layout.text import parse_layout
from dynatrain.train.trainer import Trainer

DENSE = small_shape(num_attention_heads=8, num_key_value_heads=4, head_dim=8)
FOUR = replace(DENSE, num_hidden_layers=4)
EXPERTS4 = latent_shape(num_hidden_layers=4, router_aux_loss_coef=0.1)
EXPERTS = latent_shape(router_aux_loss_coef=0.1)
SHORT = {
    "dense": (DENSE, ("fsdp2.tp2-sp", "pp2.cp2-ring"), "selective"),
    "experts": (EXPERTS, ("fsdp2.ep2", "tp2-sp.etp2"), "selective"),
    "halves": (FOUR, ("pp2v2-zbv",), "selective"),
}
LONG = {
    "dense, all": (DENSE, ("tp4", "fsdp2.cp2-ring", "pp2.cp2-ulysses", "cp4", "dp2.fsdp2-z2"), "full"),
    "halves, all": (FOUR, ("pp2v2.fsdp2", "pp2v2-zbv.fsdp2-z2", "pp2-zb.fsdp2-z1", "pp2v2-zb.tp2-sp"), "full"),
    "halves, some": (FOUR, ("pp2v2.tp2", "pp2v2-zbv.tp2-sp", "pp2-zb.cp2-ring-z2", "pp2v2-zb.fsdp2-z2"), "selective"),
    "halves of experts": (EXPERTS4, ("pp2-zb.fsdp2-z2.ep2", "pp2v2-zbv.dp2"), "selective"),
    "experts, all": (EXPERTS, ("cp2.tp2.ep4", "fsdp4.ep2"), "full"),
    "experts, some": (EXPERTS, ("fsdp4.ep2", "cp2.tp2.ep4", "pp2.fsdp2.ep2", "fsdp2.tp2.etp2"), "selective"),
}


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.sweep) for name in LONG)])
def test_what_is_computed_again_changes_nothing_under_any_axis(name):
    shape, tour, recompute = (SHORT | LONG)[name]

    size = parse_layout(tour[0]).world_size

    assert (
        max(
            furthest(Case(tour=tour, size=size, shape=shape, recompute=recompute, steps_each=2 if name in SHORT else 3))
        )
        <= 1e-12
    )


class Counted(TorchDispatchMode):
    """Counts the matrix products that are computed, forward and backward."""

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.products += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_on_one_layout_the_bits_are_equal_and_only_what_was_asked_for_is_computed_again():
    def work(world):
        found = {}
        for recompute in ("none", "full", "selective"):
            case = Case(tour=("fsdp2",), compute="fp32", shape=DENSE, recompute=recompute)
            sw, losses = switcher(case.job(), world, "fsdp2"), []
            with Counted() as counted:
                Trainer(case.job(), case.data(), sw, lambda step, kept=losses: kept.append(step.loss)).run(2)
            values = {key: value.clone() for key, value in sw.world.values().items()}
            found[recompute] = losses, counted.products, values
            sw.close()
        return [
            (
                losses == found["none"][0],
                all(torch.equal(values[key], value) for key, value in found["none"][2].items()),
                products,
            )
            for losses, products, values in found.values()
        ]

    for none, full, selective in everywhere(2, work):
        assert none[:2] == full[:2] == selective[:2] == (True, True)
        again = 2 * 2 * DENSE.num_hidden_layers * 7  # steps, micro-batches of a rank, layers, products of one
        assert full[2] - none[2] > again * 6 / 7  # a block's last product is of no use to its backward
        assert selective[2] == none[2]
