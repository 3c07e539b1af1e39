"""AdamW with moments of one byte (the idea of Dettmers et al. 2021, arXiv 2110.02861), the same bytes in any cut."""

from collections.abc import Iterable
from typing import Any

import torch

from dynatrain.space.optimizers import BLOCK, adamw8bit
from dynatrain.space.tensor import State
from dynatrain.train.optimizers.base import ShardedOptimizer
from dynatrain.train.optimizers.shard import Shard

_SIGNED = torch.linspace(-1, 1, 255, dtype=torch.float64)
SIGNED = torch.cat([_SIGNED.abs() * _SIGNED, torch.ones(1, dtype=torch.float64)]).float()
"""What the codes of first moments stand for, times the scale: u |u| for 255 even steps of u; code 255 is spare."""
UNSIGNED = torch.linspace(1 / 256, 1, 256, dtype=torch.float64).pow(4).float()
"""What the codes of second moments stand for: u^4 for 256 even steps of u, none of them 0: a first moment that has not
been rounded to 0 is never divided by the root of one that has."""


class AdamW8bit(ShardedOptimizer):
    """AdamW whose moments of matrices are one byte an element and one fp32 scale a block; vectors keep theirs whole.

    A block is 256 elements along the last dim of the *logical* tensor, wherever shards end. Its scale is its largest
    magnitude, over the ranks that share it; all ranks that hold a part of a row keep the scales of the whole row. So
    codes and scales are the same numbers in every layout, and move as they are: nothing is quantised anew by a switch.
    The step uses the moments as they are before they are rounded.

    With s the scale of its block, a first moment m is kept to within 1/127 of sqrt(|m| / s), and a second moment v to
    within 1/256 of (v / s)^(1/4).

    Collectives: per matrix whose last dim is cut, and axis that cuts it, one all-reduce of both moments' scales.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay of both moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled, as a multiple of the learning rate.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def kept(self, group: dict[str, Any], param: torch.Tensor) -> tuple[State, ...]:  # noqa: ARG002, D102
        return adamw8bit(tuple(param.shape), str(param.dtype).removeprefix("torch."))

    def update(  # noqa: D102
        self, group: dict[str, Any], shard: Shard, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]
    ) -> None:
        first, second = group["betas"]
        mean, square = _read(shard, state, "exp_avg", grad), _read(shard, state, "exp_avg_sq", grad)
        mean.lerp_(grad, 1 - first)
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        _write(shard, state, (mean, square))
        step = float(state["step"])
        root = (square / (1 - second**step)).sqrt_().add_(group["eps"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.addcdiv_(mean, root, value=-group["lr"] / (1 - first**step))


def _read(shard: Shard, state: dict[str, Any], name: str, like: torch.Tensor) -> torch.Tensor:
    """A moment of this rank's piece: its own tensor, or a new one that the codes stand for."""
    if name in state:
        return shard.of(state[name])
    book = (SIGNED if name == "exp_avg" else UNSIGNED).to(like.device)
    return dequantise(shard.of(state[f"{name}_codes"]), state[f"{name}_scale"], book, shard.box[-1]).to(like.dtype)


def _write(shard: Shard, state: dict[str, Any], moments: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Keep the new moments; tensors of the state itself were changed in place."""
    if "exp_avg" in state:
        return
    last = len(shard.shape) - 1
    scales = shard.max(torch.stack([block_scales(m, shard.box[-1], shard.shape[-1]) for m in moments]), (last,))
    named = zip(("exp_avg", "exp_avg_sq"), moments, scales, (SIGNED, UNSIGNED), strict=True)
    for name, moment, scale, book in named:
        state[f"{name}_scale"].copy_(scale)
        shard.of(state[f"{name}_codes"]).copy_(quantise(moment, scale, book.to(moment.device), shard.box[-1]))


def block_scales(values: torch.Tensor, ends: tuple[int, int], length: int) -> torch.Tensor:
    """The largest magnitude of each block of whole rows, as far as this rank sees it: fp32 [..., blocks].

    Args:
        values: [..., columns]; columns ``ends`` of rows.
        ends: first column, and one past the last.
        length: of whole rows.
    """
    blocks = -(-length // BLOCK)
    found = values.new_zeros((*values.shape[:-1], blocks * BLOCK), dtype=torch.float32)
    found[..., slice(*ends)] = values.abs()
    return found.unflatten(-1, (blocks, BLOCK)).amax(-1)


def quantise(values: torch.Tensor, scales: torch.Tensor, book: torch.Tensor, ends: tuple[int, int]) -> torch.Tensor:
    """The codes, uint8, of those entries of ``book`` that are nearest to ``values`` over their blocks' scales.

    Args:
        values: [..., columns], columns ``ends`` of rows.
        scales: [..., blocks] of whole rows.
        book: ascending, 256 entries.
        ends: first column, and one past the last.
    """
    shares = values.float() / _spread(scales, ends).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.bucketize(shares, (book[1:] + book[:-1]) / 2).to(torch.uint8)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, book: torch.Tensor, ends: tuple[int, int]) -> torch.Tensor:
    """What ``codes`` stand for, fp32; arguments as in :func:`quantise`."""
    return book[codes.int()] * _spread(scales, ends)


def _spread(scales: torch.Tensor, ends: tuple[int, int]) -> torch.Tensor:
    """The scale of each element in columns ``ends``."""
    return scales.repeat_interleave(BLOCK, -1)[..., slice(*ends)]
