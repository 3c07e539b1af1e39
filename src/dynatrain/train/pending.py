"""Whether gradients wait for an update that is yet to come: an order that began meanwhile would drop them.

Two signs say that they do. A forward with gradients on has run since the last update, in a part of the model or in an
FSDP2 unit inside it: equally on all ranks, also on one whose parameters are all frozen. And a gradient was written
since: that finds what no module's call shows, such as a method of the model's own that computes with its parameters.

A step ends the wait when its update is made, the forwards of its closure included; ``optimizer.zero_grad()`` ends it as
well, which throws away what was accumulated, as behind an update that a ``GradScaler`` has skipped.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dynatrain.train.torch_private import local_tensor, times_written
from dynatrain.train.torch_private_fsdp import unreduced


class Pending:
    """Of one world.

    Args:
        parts: the modules of this rank; they are given hooks, where anything is trained.
        optimizer: over their parameters.

    Attributes:
        forward: a forward with gradients on has run since :meth:`clear`.
    """

    def __init__(self, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self._parts = parts
        self._optimizer = optimizer
        self._used: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.forward = False
        if not optimizer.param_groups:  # without an update to come, no forward waits for one
            return
        for part in parts:
            part.register_forward_pre_hook(self._part_runs)
            for module in part.modules():
                if isinstance(module, FSDPModule) and module is not part:
                    module.register_forward_pre_hook(self._unit_runs)

    def _part_runs(self, _part: nn.Module, _args: Any) -> None:
        self.forward = self.forward or torch.is_grad_enabled()

    def _unit_runs(self, _unit: nn.Module, _args: Any) -> None:
        # A unit that is compiled says nothing: what its graph wrote here would have it compiled once more.
        if not torch.compiler.is_compiling() and not self.forward:
            self.forward = torch.is_grad_enabled()

    def clear(self) -> None:
        """What was accumulated is used, or thrown away."""
        self.forward = False
        self._used = {
            id(param): (weakref.ref(grad), _writes(grad))
            for group in self._optimizer.param_groups
            for param in group["params"]
            if (grad := param.grad) is not None
        }

    @property
    def waits(self) -> bool:
        """Whether gradients wait. Reads those that were written since :meth:`clear`: for where an order would begin."""
        return self.forward or self._accumulated()

    def _accumulated(self) -> bool:
        if not self._optimizer.param_groups:
            return False
        if any(unreduced(part) for part in self._parts):
            return True
        # What was set to zero otherwise than by the optimizer was written as well.
        return any(
            bool(local_tensor(grad).count_nonzero())
            for group in self._optimizer.param_groups
            for param in group["params"]
            if (grad := param.grad) is not None and not self._is_used(param, grad)
        )

    def _is_used(self, param: torch.Tensor, grad: torch.Tensor) -> bool:
        known = self._used.get(id(param))
        return known is not None and known[0]() is grad and known[1] == _writes(grad)


def _writes(grad: torch.Tensor) -> int:
    """FSDP2 adds to the local shard, autograd to the gradient as it is held: each counts for itself."""
    return times_written(grad) + times_written(local_tensor(grad))
