"""AdamW over a part, the learning rate as a function of the step, and the layout-free global norm."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dynatrain.train.torch_private import local_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """AdamW and its schedule.

    Attributes:
        lr: peak learning rate.
        betas: AdamW's.
        eps: AdamW's.
        weight_decay: of matrices; vectors (norm weights) are not decayed.
        warmup_steps: linear from 0 to ``lr``.
        total_steps: where the cosine ends.
        min_lr_ratio: the cosine's floor as a part of ``lr``.
        clip_norm: largest global gradient norm; 0 switches clipping off.
        exact_norm: sum the squares of each row in its own slot and in one order, so that the norm has equal bits in
            all layouts that cut rows only; costs one float64 per row in the all-reduce.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 0
    total_steps: int = 1
    min_lr_ratio: float = 0.1
    clip_norm: float = 1.0
    exact_norm: bool = False


def lr_factor(settings: OptimizerSettings) -> Callable[[int], float]:
    """The learning rate at a step (0-based) as a part of the peak: linear warm-up, then cosine to the floor."""

    def factor(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        span = max(1, settings.total_steps - settings.warmup_steps)
        done = min(1.0, (step - settings.warmup_steps) / span)
        return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def adamw(part: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW with two groups, ``decay`` (matrices) and ``no_decay`` (vectors)."""
    params = [param for param in part.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": settings.weight_decay, "name": "decay"},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0, "name": "no_decay"},
    ]
    for group in groups:
        # foreach has the loop's bits, but refuses a list of DTensors over different meshes.
        group["foreach"] = len({_mesh_of(param) for param in group["params"]}) == 1
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def _mesh_of(param: torch.Tensor) -> object:
    return param.device_mesh if isinstance(param, DTensor) else None


@dataclass(frozen=True, slots=True)
class Counted:
    """A parameter as the norm counts it.

    Attributes:
        param: the live parameter.
        mine: whether this rank's piece is the one of its copies that counts.
        first_slot: first slot of this piece's rows (``exact_norm``).
        slot: index among all tensors.
    """

    param: nn.Parameter
    mine: bool
    first_slot: int
    slot: int


def step_totals(
    losses: torch.Tensor, counted: Sequence[Counted], num_slots: int, group: dist.ProcessGroup, *, exact: bool
) -> tuple[float, float]:
    """Loss and global gradient norm of the step, with one all-reduce over the world.

    Args:
        losses: fp64 [micro-batches]; each micro-batch's loss on exactly one rank, zero elsewhere.
        counted: this rank's parameters.
        num_slots: slots of all tensors of the model (tensors, or rows with ``exact``).
        group: all ranks.
        exact: one slot per row instead of one per tensor.

    Returns:
        ``(loss, norm)``, equal on all ranks, whatever the layout.
    """
    slots = torch.zeros(len(losses) + num_slots, dtype=torch.float64)
    slots[: len(losses)] = losses
    for item in counted:
        if item.mine and item.param.grad is not None:
            grad = local_tensor(item.param.grad)
            squares = grad.double().square()
            if exact:
                rows = squares.flatten(1).sum(1) if squares.ndim > 1 else squares
                start = len(losses) + item.first_slot
                slots[start : start + len(rows)] += rows.cpu()
            else:
                slots[len(losses) + item.slot] += squares.sum().cpu()
    dist.all_reduce(slots, group=group)
    return float(slots[: len(losses)].sum()), math.sqrt(float(slots[len(losses) :].sum()))


def clip(params: Sequence[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients in place so that the global norm is at most ``limit``, by torch's formula.

    Where nothing is to be clipped, or ``limit`` is 0, every bit is left alone.
    """
    scale = limit / (norm + 1e-6)
    if limit and scale < 1:
        for param in params:
            if param.grad is not None:
                local_tensor(param.grad).mul_(scale)
