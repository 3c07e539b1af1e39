"""The methods of an optimizer as the loop calls them: whoever follows is told of updates, and of gradients dropped."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from dynatrain.train.pending import Pending


def follow(optimizer: torch.optim.Optimizer, pending: Pending, update: Callable[[Callable[[], Any]], Any]) -> None:
    """Have every update of ``optimizer`` go through ``update``, and ``pending`` know what was used or thrown away.

    Args:
        optimizer: mutated: its ``step`` and ``zero_grad`` are replaced, as methods, which schedulers expect.
        pending: of its world.
        update: is given what makes the update, and returns what that returned.
    """
    step, zero_grad = optimizer.step, optimizer.zero_grad

    @functools.wraps(_function(step))
    def stepped(_optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        done = update(lambda: step(*args, **kwargs))
        pending.clear()  # behind it: a closure runs forward inside
        return done

    @functools.wraps(_function(zero_grad))
    def zeroed(_optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        zero_grad(*args, **kwargs)
        pending.clear()

    optimizer.step = MethodType(stepped, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = MethodType(zeroed, optimizer)  # type: ignore[method-assign]


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    """What is bound: a wrapper that is bound itself has its signature, without ``self``, from this."""
    return getattr(method, "__func__", method)
