"""Empty state in the form that a schema gives it."""

import torch
from torch.distributed.tensor import DTensor

from dynatrain.space.box import shape_of
from dynatrain.space.tensor import State
from dynatrain.train.optimizers.shard import Shard
from dynatrain.train.torch_private import local_tensor, shard_of


def blank(param: torch.Tensor, state: State) -> torch.Tensor:
    """What a first step finds: zeros. Like the parameter where it has its shape, else this rank's plain piece.

    Scalars lie on the host, where torch keeps its step counters.
    """
    dtype = getattr(torch, state.dtype)
    if state.scalar:
        return torch.zeros((), dtype=dtype)
    if not state.like_tensor:
        return torch.zeros(local_shape(param, state), dtype=dtype, device=param.device)
    local = torch.zeros_like(local_tensor(param), dtype=dtype, memory_format=torch.preserve_format)
    return shard_of(param, local) if isinstance(param, DTensor) else local


def local_shape(param: torch.Tensor, state: State) -> tuple[int, ...]:
    """Shape of this rank's piece of a state."""
    shard = Shard(param)
    return shape_of(state.box(shard.box, shard.shape))
