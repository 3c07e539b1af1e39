"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235) on sharded parameters."""

from collections.abc import Iterable
from typing import Any

import torch

from dynatrain.space.optimizers import adafactor
from dynatrain.space.tensor import State
from dynatrain.train.optimizers.base import ShardedOptimizer
from dynatrain.train.optimizers.shard import Shard


class Adafactor(ShardedOptimizer):
    """Second moments of a matrix as the product of its rows' and its columns' means; no first moment.

    With G the gradient, t the step, b = 1 - t^decay, R and C the running means of G^2 + eps over each row and each
    column: the update is U = G / sqrt(R C / mean(R)), divided by max(1, RMS(U) / clip), RMS over the whole tensor.
    Vectors keep the whole second moment. The learning rate is absolute. Tensors of more dims are stacks of matrices.

    Collectives, per matrix and axis that cuts it: one all-reduce of a row's or column's sums, one more of the mean of R
    where rows are cut, one of RMS(U). No element of the gradient leaves its rank.

    Args:
        params: parameters or groups.
        lr: learning rate.
        decay: exponent of the running means, negative.
        eps: added to squares.
        clip: largest RMS of an update before the learning rate.
        weight_decay: decoupled, as a multiple of the learning rate.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        decay: float = -0.8,
        eps: float = 1e-30,
        clip: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps, "clip": clip, "weight_decay": weight_decay})

    def kept(self, group: dict[str, Any], param: torch.Tensor) -> tuple[State, ...]:  # noqa: ARG002, D102
        return adafactor(tuple(param.shape), str(param.dtype).removeprefix("torch."))

    def update(  # noqa: D102
        self, group: dict[str, Any], shard: Shard, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]
    ) -> None:
        fresh = float(state["step"]) ** group["decay"]
        squares = grad.square() + group["eps"]
        if "exp_avg_sq" in state:
            moment = shard.of(state["exp_avg_sq"]).lerp_(squares, fresh)
            scaled = grad * moment.rsqrt()
        else:
            scaled = grad * _factored(shard, squares, state, fresh)
        too_large = shard.mean_square(scaled).sqrt() / group["clip"]
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(scaled.div_(too_large.clamp_(min=1)).mul_(group["lr"]))


def _factored(shard: Shard, squares: torch.Tensor, state: dict[str, Any], fresh: float) -> torch.Tensor:
    """One over the root of the second moment, from the factors, which it brings up to date."""
    rows, columns = len(shard.shape) - 2, len(shard.shape) - 1
    row = shard.sum(squares.sum(columns), (columns,)) / shard.shape[columns]
    column = shard.sum(squares.sum(rows), (rows,)) / shard.shape[rows]
    row = state["exp_avg_sq_row"].lerp_(row, fresh)
    column = state["exp_avg_sq_col"].lerp_(column, fresh)
    mean = shard.sum(row.sum(-1, keepdim=True), (rows,)) / shard.shape[rows]
    return (row / mean).rsqrt().unsqueeze(columns) * column.rsqrt().unsqueeze(rows)
