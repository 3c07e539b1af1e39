"""Which held-out samples are validated, and when."""

import numpy as np

from dynatrain.data.order import permuted
from dynatrain.train.validation import Validation


def ids(batches, seed=3, size=21):
    return Validation(data=range(size), every=5, batches=batches).ids(seed, 4).tolist()


def test_they_are_the_first_of_the_seeds_order_each_once_however_many():
    order = permuted(3, 0, np.arange(21), 21).tolist()

    assert sorted(order) == list(range(21))
    assert [ids(batches) for batches in (1, 2, 5, 6, 99)] == [order[:n] for n in (4, 8, 20, 21, 21)]
    assert ids(2, seed=4) != ids(2)


def test_they_are_validated_after_every_so_many_steps():
    validation = Validation(data=range(3), every=5, batches=1)

    assert [step for step in range(16) if validation.due(step)] == [4, 9, 14]
