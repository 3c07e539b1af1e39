"""Each way to cut a run is the oracle's run: ZeRO-1 and 2, uneven shares, single precision, bf16 compute."""

from dataclasses import replace

import pytest
from tests.jobs import SHAPE, TEN, Case, expected, train
from tests.shapes import small_shape

ZERO = ("fsdp4-z1", "fsdp2-z1.tp2-sp", "pp2.fsdp2-z1", "dp2.fsdp2-z1", "pp2.fsdp2-z2")
THREE = ("fsdp3", "pp3", "dp3", "fsdp3-z1", "pp3", "fsdp3-z2")
TWO = ("dp2", "fsdp2", "tp2", "tp2-sp", "pp2")
GPT2 = small_shape(
    family="gpt2", num_key_value_heads=4, vocab_size=62, max_position_embeddings=63, attention_dropout=0.2
)
TIED = small_shape(
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True, qk_norm=True
)


def furthest(case, seconds=200):
    """The largest distance of any state on any rank after any visit, and of any loss."""
    losses, visits = expected(case)
    found = train(case, visits, seconds)
    for result in found:
        outcomes = [switch[0] for switch in result["switches"]]
        assert outcomes == ["committed"] * (len(case.tour) - 1)
    states = max(apart for result in found for visit in result["apart"] for apart in visit.values())
    return states, max(abs(mine - loss) for loss, (_, mine, *_) in zip(losses, found[0]["steps"], strict=True))


def test_parameters_kept_gathered_and_gradients_reduced_once_a_step_change_nothing():
    states, losses = furthest(Case(tour=ZERO, micro_batches=8))

    assert states <= 1e-12
    assert losses <= 1e-12


def test_three_ranks_share_eight_micro_batches_unevenly_and_change_nothing():
    states, losses = furthest(Case(tour=THREE, size=3, micro_batches=8))

    assert states <= 1e-12
    assert losses <= 1e-12


def test_a_tied_embedding_with_two_holders_and_norms_of_heads_change_nothing():
    states, losses = furthest(Case(tour=("pp4", "fsdp2.tp2", "pp2.fsdp2"), shape=TIED))

    assert states <= 1e-12
    assert losses <= 1e-12


def test_ranks_without_any_row_of_the_vocabulary_change_nothing():
    """Five rows over four ranks are 2, 2, 1 and 0: torch's own lookup fails on the last one."""
    tied = replace(TIED, vocab_size=5)
    states, losses = furthest(Case(tour=("tp4-sp", "fsdp2.tp2", "tp4"), steps_each=2, shape=tied))

    assert max(states, losses) <= 1e-12


def test_biases_and_learned_positions_and_dropped_attention_change_nothing():
    """GPT-2's form: two ranks in each way to cut it, then the products, with one tensor for embedding and head."""
    tied = replace(GPT2, tie_word_embeddings=True, num_hidden_layers=4, vocab_size=61)
    alone = furthest(Case(tour=TWO, size=2, shape=GPT2))
    mixed = furthest(Case(tour=("fsdp2.tp2", "pp2.tp2-sp"), shape=tied))

    assert max(*alone, *mixed) <= 1e-12


def test_pipelines_that_run_all_forwards_first_change_nothing():
    """Two micro-batches for four stages: the schedule that is used otherwise refuses so few."""
    states, losses = furthest(Case(tour=("pp4", "pp2.fsdp2", "pp2.tp2"), micro_batches=2, schedule="gpipe"))

    assert states <= 1e-12
    assert losses <= 1e-12


@pytest.mark.sweep
def test_every_composition_is_right_in_single_precision():
    """What fp64 cannot show: other kernels, other divisions, reductions in another dtype."""
    states, losses = furthest(Case(tour=(*TEN, "fsdp4-z1", "fsdp4-z2"), compute="fp32"))

    assert states <= 1e-4
    assert losses <= 1e-4
    assert states > 0


def test_computing_in_bf16_stays_near_and_keeps_single_precision_masters():
    case = Case(tour=("fsdp4", "dp2.tp2-sp", "pp2.fsdp2", "dp4"), compute="bf16", shape=SHAPE)
    losses, visits = expected(case)  # in fp32; train() compares dtypes as well
    found = train(case, visits, 200)

    apart = [abs(mine - loss) for loss, (_, mine, *_) in zip(losses, found[0]["steps"], strict=True)]
    assert 1e-5 < max(apart) <= 1e-2
