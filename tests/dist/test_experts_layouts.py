"""Experts, latents and what balances the load are the oracle's in layouts that cut batches, rows and layers."""

from tests.dist.test_same_numbers import furthest
from tests.jobs import Case
from tests.shapes import latent_shape

SHAPE = latent_shape(router_aux_loss_coef=0.1)


def test_three_ranks_share_four_micro_batches_unevenly_and_route_as_one():
    """The third rank's share is filled up with what no router may count."""
    case = Case(tour=("fsdp3", "pp3", "dp3"), size=3, steps_each=2, shape=SHAPE, micro_batches=4)

    assert max(furthest(case)) <= 1e-12
