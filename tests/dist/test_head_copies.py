"""With more tp ranks than key/value heads, training is the oracle's run and copies of a head stay equal to the bit."""

from dataclasses import replace

import pytest
from tests.dist.test_same_numbers import furthest
from tests.jobs import SHAPE, Case, expected, train
from torch.distributed.tensor import Replicate, Shard

from dynatrain.train import head_copies

TWO = replace(SHAPE, num_hidden_layers=2, num_key_value_heads=2, qk_norm=True)
ONE = replace(TWO, num_key_value_heads=1)


def test_four_ranks_with_two_heads_change_nothing():
    """A switch refuses copies that differ in a bit: these are compared twice."""
    assert max(furthest(Case(tour=("tp4", "fsdp2.tp2", "tp4-sp"), shape=TWO, modes=("keep", "tight")))) <= 1e-12


@pytest.mark.sweep
def test_one_head_for_all_ranks_changes_nothing_in_any_product_of_axes():
    tour = ("tp4", "fsdp2.tp2", "pp2-zb.tp2", "dp2.tp2-sp.order_2_0_3_1", "cp2.tp2", "fsdp2-z2.tp2")

    assert max(furthest(Case(tour=tour, shape=ONE))) <= 1e-12


def test_copies_that_keep_their_own_share_of_the_gradient_are_found_at_the_next_switch(monkeypatch):
    monkeypatch.setattr(head_copies, "SUMMED", (Shard(0), Replicate()))
    case = Case(tour=("tp2", "fsdp2"), size=2, shape=ONE)
    found = train(case, expected(case)[1])

    ((outcome, reason, *_),) = found[0]["switches"]
    assert outcome == "aborted"
    assert "k_proj.weight" in reason
    assert max(found[0]["apart"][0].values()) > 1e-4
