"""Several optimizers as one: what a step, a schedule, a switch and a checkpoint see."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Several(torch.optim.Optimizer):
    """Steps each of ``optimizers``, in order. Their groups are its groups, and one mapping holds the state of all.

    Args:
        optimizers: over different parameters; from here on, step and change them through this object alone.

    Raises:
        ValueError: two of them have a parameter in common.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([{"params": []}], {})
        self.optimizers = tuple(optimizers)
        params = [id(param) for one in self.optimizers for group in one.param_groups for param in group["params"]]
        if len(set(params)) != len(params):
            raise ValueError(f"{len(params) - len(set(params))} parameter(s) are in more than one optimizer")
        for one in self.optimizers:
            self.state.update(one.state)
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for one in self.optimizers:
            one.param_groups = [next(groups) for _ in one.param_groups]
            one.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; the optimizers share what was loaded."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of each."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for one in self.optimizers:
            one.step()
        return loss


def members(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """``optimizer`` itself, then those that it is made of, where it is several."""
    inner = optimizer.optimizers if isinstance(optimizer, Several) else ()
    return (optimizer, *(one for member in inner for one in members(member)))


def single(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that update parameters: ``optimizer`` itself, where it is one."""
    return tuple(one for one in members(optimizer) if not isinstance(one, Several))
