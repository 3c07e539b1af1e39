"""The first update of a new world, rehearsed beside training on tensors without memory.

DTensor works out how the results of an operator are laid out when it first meets it, and a foreach update meets all
parameters at once: without a rehearsal the first step after a first visit to a layout takes that much longer.
"""

import inspect
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dynatrain.train.optimizers.several import single
from dynatrain.train.torch_private import local_tensor, shard_of, sharing_decisions, takes_foreach

_LOG = logging.getLogger(__name__)


def rehearse(optimizer: torch.optim.Optimizer) -> None:
    """Have DTensor decide, for all threads of this process, what an update by ``optimizer`` will ask it.

    Only torch's own optimizers: another's update may do more than compute. Reads shapes and settings, and writes
    nothing; no rank waits for another. What cannot be rehearsed is only slower the first time.

    Args:
        optimizer: over the parameters of a world that was built, with or without storage.
    """
    for one in single(optimizer):
        # A fused update is a single operator.
        if not type(one).__module__.startswith("torch.optim") or any(group.get("fused") for group in one.param_groups):
            continue
        try:
            _update(one)
        except Exception as error:  # noqa: BLE001 - training does not depend on it
            _LOG.info("%s is not rehearsed: %s: %s", type(one).__name__, type(error).__name__, error)


def _update(optimizer: torch.optim.Optimizer) -> None:
    """One update by a double of ``optimizer`` that nobody has hooked, over parameters without memory."""
    kind = type(optimizer)
    double = kind.__new__(kind)
    double.__dict__ |= optimizer.__dict__ | {"state": defaultdict(dict)}
    double.param_groups = [_without_memory(group) for group in optimizer.param_groups]
    with torch.no_grad(), sharing_decisions():
        inspect.unwrap(kind.step)(double)


def _without_memory(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group with gradients, whose tensors have shapes and placements alone."""
    params = [param for param in group["params"] if param.requires_grad]
    way = group.get("foreach")
    return group | {
        "params": _shapes(params),
        # What torch would choose by where the parameters are, which those without memory are not.
        "foreach": takes_foreach(params) if way is None else way,
        "capturable": False,
    }


def _shapes(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    made = []
    for param in params:
        shape, gradient = (torch.empty_like(local_tensor(param), device="meta") for _ in range(2))
        if isinstance(param, DTensor):
            shape, gradient = shard_of(param, shape), shard_of(param, gradient)
        shape.grad = gradient
        made.append(shape)
    return made
