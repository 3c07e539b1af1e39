"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) on sharded matrices."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from dynatrain.space.optimizers import momentum as buffer_alone
from dynatrain.space.tensor import State
from dynatrain.train.optimizers.base import ShardedOptimizer
from dynatrain.train.optimizers.shard import Shard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic whose iterates send singular values in (0, 1] to about 1."""


class Muon(ShardedOptimizer):
    """Momentum whose update is made orthogonal; for matrices alone: give embeddings, heads and vectors to AdamW.

    With B the running mean of gradients and N its Nesterov form: the update is 0.2 sqrt(max(rows, columns)) times the
    orthogonal factor of N by five Newton-Schulz steps (the scale of Liu et al. 2025, arXiv 2502.16982, which gives it
    the root mean square of AdamW's updates, so that both can share a learning rate). Tensors of more dims are stacks
    of matrices.

    Collectives, per matrix: an all-gather of N for each axis that cuts it. Every rank then computes the same factor of
    the whole matrix, and keeps its own piece.

    Args:
        params: matrices, or groups of them.
        lr: learning rate.
        momentum: decay of the running mean.
        weight_decay: decoupled, as a multiple of the learning rate.
        steps: of Newton and Schulz.
        bf16: compute those in bfloat16, not in the parameter's dtype: faster, and not equal in every layout to more
            than its few digits.

    Raises:
        ValueError: a parameter is no matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        steps: int = 5,
        bf16: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": steps, "bf16": bf16}
        )
        shapes = [tuple(param.shape) for group in self.param_groups for param in group["params"] if param.ndim < 2]
        if shapes:
            raise ValueError(f"Muon was given parameters of shapes {shapes}; it takes matrices, AdamW takes the rest")

    def kept(self, group: dict[str, Any], param: torch.Tensor) -> tuple[State, ...]:  # noqa: ARG002, D102
        return buffer_alone(str(param.dtype).removeprefix("torch."))

    def update(  # noqa: D102
        self, group: dict[str, Any], shard: Shard, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]
    ) -> None:
        buffer = shard.of(state["momentum_buffer"]).lerp_(grad, 1 - group["momentum"])
        whole = shard.gather(grad.lerp(buffer, group["momentum"]))
        factor = orthogonal(whole.bfloat16() if group["bf16"] else whole, group["steps"])
        scale = 0.2 * math.sqrt(max(whole.shape[-2:]))
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(shard.cut_out(factor).to(param.dtype) * (group["lr"] * scale))


def orthogonal(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """About the orthogonal factor U V^T of ``matrix`` = U S V^T, by Newton-Schulz iteration in its dtype.

    Args:
        matrix: [..., rows, columns]; not changed.
        steps: iterations.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
