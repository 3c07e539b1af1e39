"""The order of samples: every id once an epoch, known from (seed, step) alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynatrain.data.order import batch_ids, micro_shares, permuted


@given(st.integers(0, 2**40), st.integers(0, 50), st.integers(1, 300))
def test_every_epoch_is_a_permutation(seed, epoch, count):
    assert sorted(permuted(seed, epoch, np.arange(count), count)) == list(range(count))


@given(st.integers(1, 60), st.integers(1, 100))
def test_every_id_comes_once_an_epoch_though_batches_straddle_its_edge(count, batch):
    steps = -(-3 * count // batch)
    ids = np.concatenate([batch_ids(5, step, batch, count) for step in range(steps)])

    assert ids.dtype == np.int64
    for epoch in range(3):
        assert sorted(ids[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_a_place_is_evaluated_alone_with_the_same_result():
    whole = permuted(3, 1, np.arange(1000), 1000)

    assert [permuted(3, 1, np.array([place]), 1000)[0] for place in (0, 17, 999)] == [whole[0], whole[17], whole[999]]


def test_a_batch_over_the_edge_is_the_end_of_one_epoch_and_the_start_of_the_next():
    ends, starts = permuted(3, 0, np.arange(100), 100), permuted(3, 1, np.arange(100), 100)

    assert list(batch_ids(3, 3, 30, 100)) == [*ends[90:], *starts[:20]]


def test_epochs_and_seeds_have_unrelated_orders():
    count = 20_000
    places = np.arange(count)
    orders = [permuted(seed, epoch, places, count) for seed, epoch in ((0, 0), (0, 1), (1, 0))]

    for one in orders:
        assert abs(np.corrcoef(one, places)[0, 1]) < 5 / count**0.5
        assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 5 / count**0.5
        assert np.sum(one == places) < 10
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef(orders[i], orders[j])[0, 1]) < 5 / count**0.5
        assert np.sum(orders[i] == orders[j]) < 10


@pytest.mark.parametrize(("micro_batches", "ranks"), [(8, 3), (4, 4), (7, 2), (3, 5)])
def test_shares_of_micro_batches_cover_them_and_differ_by_at_most_one(micro_batches, ranks):
    shares = micro_shares(micro_batches, ranks)

    assert sorted(i for share in shares for i in share) == list(range(micro_batches))
    assert all(i % ranks == rank for rank, share in enumerate(shares) for i in share)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
