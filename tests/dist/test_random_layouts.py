"""Random models on random legal layouts over all axes: a walk over three of them and back is the oracle's run."""

import random

import pytest
from tests import toys
from tests.dist.test_same_numbers import furthest
from tests.jobs import TOKENS, Case

from dynatrain.layout.legality import problems
from dynatrain.layout.text import print_layout
from dynatrain.space.blocks import Experts
from dynatrain.space.decoder import DecoderShape

MICRO_BATCHES = 8
SEEDS = range(40)
SHORT = (2,)
"""Seeds that are tried every time, on four ranks."""


def shape_of(pick, of):
    """A decoder with the sizes of a toy."""
    experts = of.experts and Experts(
        num_experts=of.experts,
        num_experts_per_tok=pick([n for n in (1, 2, 3) if n <= of.experts]),
        moe_intermediate_size=of.expert_inner,
        gate=pick(("softmax", "sigmoid")),
        n_shared_experts=pick((0, 1)),
        first_k_dense_replace=min(of.dense, of.layers - 1),
        router_aux_loss_coef=pick((0.0, 0.1)),
    )
    return DecoderShape(
        hidden_size=of.width,
        intermediate_size=of.inner,
        num_hidden_layers=of.layers,
        num_attention_heads=of.heads,
        num_key_value_heads=of.kv_heads,
        head_dim=2 * of.head,
        vocab_size=of.vocabulary,
        tie_word_embeddings=of.tied,
        qk_norm=pick((False, True)),
        dropout=0.1,
        max_position_embeddings=64,
        experts=experts or None,
    )


def case_of(seed, sizes):
    """A random model, and a walk over three layouts of one world and back to the first."""
    pick = random.Random(seed).choice
    while True:
        of, size = toys.toy(pick), pick(sizes)
        shape, tour = shape_of(pick, of), []
        for _ in range(200):
            layout = toys.layout(pick, of, size)
            text = print_layout(layout)
            if text not in tour and not problems(
                layout, shape.limits(), num_microbatches=MICRO_BATCHES, sequence=TOKENS
            ):
                tour.append(text)
            if len(tour) == 3:
                return Case(
                    tour=(*tour, tour[0]), size=size, shape=shape, micro_batches=MICRO_BATCHES, seed=seed, samples=84
                )


@pytest.mark.parametrize("seed", SHORT)
def test_a_random_walk_of_four_ranks_is_the_oracles_run(seed):
    case = case_of(seed, (4,))

    assert max(furthest(case)) <= 1e-12, case


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_walks_of_up_to_eight_ranks_are_the_oracles_runs(seed):
    case = case_of(seed, (4, 5, 6, 7, 8))

    assert max(furthest(case)) <= 1e-12, case
