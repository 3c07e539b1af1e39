"""The schemas of live optimizers: which states one keeps of which parameter, and in what form."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from dynatrain.space import optimizers as schemas
from dynatrain.space.tensor import State
from dynatrain.train.optimizers.adafactor import Adafactor
from dynatrain.train.optimizers.adamw8bit import AdamW8bit
from dynatrain.train.optimizers.base import ShardedOptimizer
from dynatrain.train.optimizers.muon import Muon
from dynatrain.train.optimizers.several import single

Schema = Callable[[dict[str, Any], torch.Tensor], tuple[State, ...]]
"""``(parameter group, parameter) -> states``."""


def _adam(group: dict[str, Any], param: torch.Tensor) -> tuple[State, ...]:
    return schemas.adam(_dtype(param), amsgrad=group["amsgrad"])


def _sgd(group: dict[str, Any], param: torch.Tensor) -> tuple[State, ...]:
    # Zeros are what the first step finds in place of no buffer; with dampening it would weigh that gradient otherwise.
    if group["momentum"] and group["dampening"]:
        raise ValueError(
            f"SGD with dampening {group['dampening']} takes its first gradient whole and later ones in part, which a "
            "momentum buffer does not tell; set dampening to 0"
        )
    return schemas.momentum(_dtype(param)) if group["momentum"] else ()


SCHEMAS: dict[type[torch.optim.Optimizer], Schema] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: _sgd,
}
"""Of optimizers that do not tell by themselves, as a :class:`ShardedOptimizer` does. A user may add their own."""

OURS = (Adafactor, Muon, AdamW8bit)


def kept(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, tuple[State, ...], dict[str, Any]]]:
    """Each parameter, the states that ``optimizer`` keeps of it, and its group. A frozen one has none, or those it had.

    Raises:
        LookupError: an optimizer without a schema, by name.
        ValueError: options that no schema describes.
    """
    if unknown := [one for one in single(optimizer) if _schema(one) is None]:
        names = ", ".join(f"{type(one).__module__}.{type(one).__name__}" for one in unknown)
        known = ", ".join([f"torch.optim.{kind.__name__}" for kind in SCHEMAS] + [kind.__name__ for kind in OURS])
        raise LookupError(f"optimizer {names} has no state schema, so its state cannot be moved; known: {known}")
    for one in single(optimizer):
        schema = _schema(one)
        assert schema is not None
        for group in one.param_groups:
            for param in group["params"]:
                yield param, (schema(group, param) if param.requires_grad or one.state.get(param) else ()), group


def _schema(optimizer: torch.optim.Optimizer) -> Schema | None:
    return optimizer.kept if isinstance(optimizer, ShardedOptimizer) else SCHEMAS.get(type(optimizer))


def _dtype(param: torch.Tensor) -> str:
    return str(param.dtype).removeprefix("torch.")
