"""Which held-out samples are validated, and when."""

import numpy as np
import pytest

from dynatrain.config.run import RunConfig
from dynatrain.data.order import permuted
from dynatrain.space.run_check import check_run
from dynatrain.train import rank
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


@pytest.mark.parametrize("document_mask", [False, True])
def test_both_sides_know_documents_where_the_run_asks_for_it(monkeypatch, tmp_path, document_mask):
    asked = {"data": {"document_mask": document_mask, "sequence": 32}, "validation": {"every": 5}}
    checked, seen = check_run(RunConfig.model_validate(asked)), []
    for name in ("open_samples", "open_validation"):
        monkeypatch.setattr(rank, name, lambda *given, **more: seen.append((*given, more)))
    rank.samples_of(checked, tmp_path)
    rank.validation_of(checked, tmp_path)

    assert seen == [(tmp_path, 32, {"document_mask": document_mask})] * 2
