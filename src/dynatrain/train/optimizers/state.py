"""Empty state in the form that a schema gives it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dynatrain.space.box import shape_of
from dynatrain.space.tensor import State
from dynatrain.train.optimizers.shard import Shard
from dynatrain.train.torch_private import local_tensor, shard_of

_ON_DEVICE = ("fused", "capturable")
"""Options of a parameter group whose kernels read and write the step counter, too."""


def scalar_device(group: Mapping[str, Any], param: torch.Tensor) -> torch.device:
    """Where torch keeps the step counter of a parameter: on the host, unless a kernel of its group counts."""
    return param.device if any(group.get(option) for option in _ON_DEVICE) else torch.device("cpu")


def blank(param: torch.Tensor, state: State, group: Mapping[str, Any]) -> torch.Tensor:
    """What a first step finds: zeros. Like the parameter where it has its shape, else this rank's plain piece.

    Args:
        param: the parameter.
        state: of it.
        group: the parameter group that it is in.
    """
    dtype = getattr(torch, state.dtype)
    if state.scalar:
        return torch.zeros((), dtype=dtype, device=scalar_device(group, param))
    if not state.like_tensor:
        return torch.zeros(local_shape(param, state), dtype=dtype, device=param.device)
    local = torch.zeros_like(local_tensor(param), dtype=dtype, memory_format=torch.preserve_format)
    return shard_of(param, local) if isinstance(param, DTensor) else local


def local_shape(param: torch.Tensor, state: State) -> tuple[int, ...]:
    """Shape of this rank's piece of a state."""
    shard = Shard(param)
    return shape_of(state.box(shard.box, shard.shape))
