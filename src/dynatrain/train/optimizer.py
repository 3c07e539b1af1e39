"""The trainer's optimizer over a part, the learning rate as a function of the step, and the layout-free global norm."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dynatrain.models.decoder import canonical_name
from dynatrain.space.optimizers import is_hidden_matrix
from dynatrain.train.optimizers.adafactor import Adafactor
from dynatrain.train.optimizers.adamw8bit import AdamW8bit
from dynatrain.train.optimizers.muon import Muon
from dynatrain.train.optimizers.several import Several
from dynatrain.train.torch_private import local_tensor
from dynatrain.train.world import as_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """The optimizer and its schedule.

    Attributes:
        name: one of :data:`dynatrain.space.optimizers.OPTIMIZERS`. With ``muon``, embeddings, head and vectors have
            AdamW.
        lr: peak learning rate.
        betas: AdamW's, in 8 bits too.
        eps: likewise.
        momentum: of ``sgd`` and ``muon``.
        bf16_newton_schulz: of ``muon``.
        weight_decay: of matrices; vectors (norm weights) are not decayed.
        warmup_steps: linear from 0 to ``lr``.
        total_steps: where the cosine ends.
        min_lr_ratio: the cosine's floor as a part of ``lr``.
        clip_norm: largest global gradient norm; 0 switches clipping off.
        exact_norm: sum the squares of each row in its own slot and in one order, so that the norm has equal bits in
            all layouts that cut rows only; costs one float64 per row in the all-reduce.
    """

    name: str = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9
    bf16_newton_schulz: bool = False
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


def optimizer_of(model: nn.Module | Sequence[nn.Module], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer that ``settings`` name over one part or several; its groups are matrices that decay, and vectors.

    Muon's is two: Muon over the hidden matrices, AdamW over the rest in the groups ``decay`` and ``no_decay``.
    """
    named = {param: canonical_name(part, path) for part in as_parts(model) for path, param in part.named_parameters()}
    params = [(name, param) for param, name in named.items() if param.requires_grad]
    if settings.name != "muon":
        return _MAKE[settings.name](_groups([param for _, param in params], settings), settings)
    hidden = [param for name, param in params if is_hidden_matrix(name, tuple(param.shape))]
    rest = [param for name, param in params if not is_hidden_matrix(name, tuple(param.shape))]
    matrices = [{"params": hidden, "weight_decay": settings.weight_decay, "name": "muon"}]
    bf16 = settings.bf16_newton_schulz
    return Several(
        [
            Muon(matrices, lr=settings.lr, momentum=settings.momentum, bf16=bf16),
            _MAKE["adamw"](_groups(rest, settings), settings),
        ]
    )


Groups = list[dict[str, Any]]


def _groups(params: Sequence[nn.Parameter], settings: OptimizerSettings) -> Groups:
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": settings.weight_decay, "name": "decay"},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0, "name": "no_decay"},
    ]


def _foreach(groups: Groups) -> Groups:
    """Torch's foreach has the loop's bits, but refuses a list of DTensors over different meshes."""
    return [group | {"foreach": len({_mesh_of(param) for param in group["params"]}) == 1} for group in groups]


_MAKE: dict[str, Callable[[Groups, OptimizerSettings], torch.optim.Optimizer]] = {
    "adamw": lambda groups, its: torch.optim.AdamW(_foreach(groups), lr=its.lr, betas=its.betas, eps=its.eps),
    "sgd": lambda groups, its: torch.optim.SGD(_foreach(groups), lr=its.lr, momentum=its.momentum),
    "adafactor": lambda groups, its: Adafactor(groups, lr=its.lr),
    "adamw8bit": lambda groups, its: AdamW8bit(groups, lr=its.lr, betas=its.betas, eps=its.eps),
}


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
