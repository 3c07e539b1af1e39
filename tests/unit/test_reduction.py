"""Gradients of micro-batches are added in one tree, wherever a step is divided into parts along it."""

import pytest
import torch

from dynatrain.train.reduction import MicroBatchCounter


def added(values, *, ranks, carried=0):
    """The sum of ``values``, one a micro-batch, as so many data ranks make it; the first ``carried`` at once."""
    param = torch.nn.Parameter(torch.zeros(()))
    counter = MicroBatchCounter([param])
    if carried:
        param.grad = added(values[:carried], ranks=1)
        counter.push(carried)
    for start in range(carried, len(values), ranks):
        param.grad = added(values[start : start + ranks], ranks=1) if ranks > 1 else values[start].clone()
        counter.push(ranks)
    counter.finish()
    return param.grad


@pytest.mark.parametrize(("carried", "ranks"), [(4, 1), (4, 2), (4, 4), (2, 1), (2, 2), (8, 2)])
def test_a_part_that_is_a_subtree_finds_its_place(carried, ranks):
    values = torch.randn(16, generator=torch.Generator().manual_seed(1))
    left_to_right = added(values[:1], ranks=1)
    for value in values[1:]:
        left_to_right = left_to_right + value

    assert added(values, ranks=ranks, carried=carried) == added(values, ranks=1) != left_to_right
