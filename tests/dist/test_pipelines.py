"""Interleaved and zero-bubble pipelines are the oracle's run, and what they refuse would be wrong without an error."""

from dataclasses import replace

import pytest
from tests.dist.test_same_numbers import TIED, furthest
from tests.jobs import SHAPE, Case
from tests.shapes import latent_shape

from dynatrain.layout.legality import problems
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import parse_layout, print_layout
from dynatrain.train import parallel

SIX = replace(SHAPE, num_hidden_layers=6)
EVERY = ("pp2v2.fsdp2", "pp2v2.tp2", "pp2-zb.fsdp2-z2", "pp2v2-zbv.dp2", "fsdp4")


def test_several_stages_a_rank_and_split_backwards_change_nothing():
    """Its tied embedding has two holders in each pipeline but the V, where two modules of one rank share a shard."""
    assert max(furthest(Case(tour=EVERY, shape=TIED))) <= 1e-12


def test_uneven_stages_change_nothing():
    """Six layers: 1, 2, 2 and 1 by default, then pinned otherwise."""
    split = print_layout(resolve(parse_layout("pp2v2"), SIX.num_hidden_layers))

    assert split == "pp2v2_1_2_2_1"
    assert max(furthest(Case(tour=("pp2v2", "pp2v2_2_1_1_2-zbv", "pp2-zb"), size=2, shape=SIX))) <= 1e-12


@pytest.mark.sweep
def test_more_stages_on_more_ranks_with_every_stage_of_zero_change_nothing():
    tours = {
        ("pp2v2-zb.fsdp2-z1", "pp2v2-zbv.fsdp2-z2", "pp2v2.fsdp2-z1", "dp2.tp2", "pp2v2-zb.tp2-sp"): TIED,
        ("pp4-zb", "pp4v2-zbv", "pp2v4.fsdp2", "pp2v4-zb.fsdp2-z2", "pp4v2"): replace(TIED, num_hidden_layers=8),
        ("pp2v2_1_2_2_1.dp2", "pp2v2_2_1_1_2-zb.fsdp2-z2.order_3_1_0_2"): SIX,
    }
    for tour, shape in tours.items():
        assert max(furthest(Case(tour=tour, shape=shape, micro_batches=8))) <= 1e-12


@pytest.mark.sweep
def test_interleaved_stages_that_run_all_forwards_first_change_nothing():
    """Also five micro-batches, of which others can make no rounds."""
    assert max(furthest(Case(tour=("pp2v2.fsdp2", "pp2v2.tp2"), schedule="gpipe", micro_batches=5))) <= 1e-12


@pytest.mark.sweep
def test_routers_in_several_parts_count_each_micro_batch_once():
    shape = latent_shape(num_hidden_layers=4, router_aux_loss_coef=0.1, vocab_size=61)

    assert max(furthest(Case(tour=("pp2v2", "pp2v2-zbv", "pp2-zb"), size=2, shape=shape))) <= 1e-12


def test_weights_that_are_freed_after_a_forward_make_zero_bubble_gradients_wrong(monkeypatch):
    """Why ``-zb`` under ZeRO-3 is refused, and why one fsdp rank keeps its weights gathered there, too."""
    (rule,) = problems(parse_layout("pp2-zb.fsdp2"), SHAPE.limits())
    fully_shard = parallel.fully_shard

    def freeing(unit, **options):
        return fully_shard(unit, **options | {"reshard_after_forward": True})

    monkeypatch.setattr(parallel, "fully_shard", freeing)
    case = Case(tour=("pp2-zb",), size=2, clip=0.0)

    assert "wrong gradients without an error" in rule
    assert furthest(case)[0] > 1e-4
