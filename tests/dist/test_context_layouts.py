"""Context parallel runs are the oracle's: each way, beside every other axis, with switches between them."""

import pytest
from tests.dist.test_same_numbers import furthest
from tests.jobs import Case
from tests.shapes import small_shape

GPT2 = small_shape(family="gpt2", num_key_value_heads=4, vocab_size=62, max_position_embeddings=63)
TOURS = {
    "each way": ("cp4", "cp2-ulysses.tp2-sp", "fsdp2.cp2-ring"),
    "beside others": ("dp2.cp2", "pp2.cp2-ring", "tp4"),
}


@pytest.mark.parametrize("name", TOURS)
def test_a_sequence_that_is_spread_over_ranks_changes_nothing(name):
    assert max(furthest(Case(tour=TOURS[name]))) <= 1e-12


@pytest.mark.sweep
def test_learned_positions_and_gathered_parameters_change_nothing():
    tour = ("cp2-ring-z1", "fsdp2", "cp2-z2", "tp2", "cp2-ulysses")
    assert max(furthest(Case(tour=tour, size=2, shape=GPT2))) <= 1e-12
