"""The common frame of our optimizers: one parameter at a time, by its own state, on its local piece."""

from collections.abc import Callable
from typing import Any

import torch

from dynatrain.space.tensor import State
from dynatrain.train.optimizers.shard import Shard
from dynatrain.train.optimizers.state import blank


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose update of a parameter needs more than each element alone.

    Subclasses say what they keep and how they update; all ranks that share a parameter must step it alike. A parameter
    without a gradient is left alone, its state too. State that is missing at a step is created, all zero.
    """

    def kept(self, group: dict[str, Any], param: torch.Tensor) -> tuple[State, ...]:
        """The schema: what is kept beside ``param`` of ``group``."""
        raise NotImplementedError

    def update(
        self, group: dict[str, Any], shard: Shard, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]
    ) -> None:
        """Change the local ``param`` and ``state`` in place by the local ``grad``."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(group, param)
        return loss

    def _step(self, group: dict[str, Any], param: torch.Tensor) -> None:
        state = self.state[param]
        if not state:
            state.update({one.name: blank(param, one, group) for one in self.kept(group, param)})
        if "step" in state:
            state["step"] += 1
        shard = Shard(param)
        self.update(group, shard, shard.of(param), shard.of(param.grad), state)
