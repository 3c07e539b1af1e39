"""Stand-ins for loops that keep their model and optimizer in variables of their own: ``accelerate``, ``Trainer``.

    model, optimizer, scheduler = stand_ins(Switcher(build, layout="fsdp4", state={"lr": make_lr}), "lr")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

A stand-in passes everything on to what the present layout has in its place: reads, writes and calls. The loop stays as
it is, because the edge between two steps is found: it lies before the first forward with gradients that follows an
update. What such a loop cannot do, and one with ``sw.steps`` can: repeat a step whose switch was taken back at its
commit (its batch gets no update), switch inside a step, or end when it is told to (the process does).
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from dynatrain.train.switcher import Switcher

SAVED_CODE, UNSAVED_CODE = 75, 143
"""Stopped before its end: saved, so that whoever starts it again goes on; or with nothing saved."""


class StandInError(ValueError):
    """The job has not one of each to stand in for: all that is missing."""


class _Edges:
    """Takes the edges of a job's steps for a loop that knows of none."""

    def __init__(self, sw: Switcher) -> None:
        self.sw, self.steps, self.due = sw, sw.steps(until=sys.maxsize), True

    def take(self) -> None:
        """Behind an update: the edge to the next step."""
        if self.due:
            if next(self.steps, None) is None:
                stopped = SAVED_CODE if self.sw.saved == self.sw.step else UNSAVED_CODE
                raise SystemExit(0 if self.sw.left else stopped)
            self.due = False


class _StandIn:
    """Passes on all but what its class says itself, and what Python looks up on classes."""

    own_names: frozenset[str] = frozenset()

    def __init__(self, live: Callable[[], Any], edges: _Edges) -> None:
        object.__setattr__(self, "_live", live)
        object.__setattr__(self, "_edges", edges)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name in type(self).own_names | {"_live", "_edges"}:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_live")(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._live(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._live(), name)

    def __repr__(self) -> str:
        return f"stand-in for {self._live()!r}"


class _Model(_StandIn, nn.Module):
    # Both say that the model is sharded already, so that nobody wraps it in DDP or moves it: the first to accelerate,
    # the second to Trainer.
    _is_accelerate_prepared = True
    is_distributed_loading_by_transformers = True
    own_names = frozenset({"_is_accelerate_prepared", "is_distributed_loading_by_transformers"})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._edges.take()
        return self._live()(*args, **kwargs)


class _Optimizer(_StandIn, torch.optim.Optimizer):
    own_names = frozenset({"step"})

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self._edges.due = True
        return self._live().step(*args, **kwargs)


class _Scheduler(_StandIn, LRScheduler):
    pass


def stand_ins(sw: Switcher, *schedulers: str) -> tuple[Any, ...]:
    """``(model, optimizer, *schedulers)`` that stand in for those of the present layout, whichever it is.

    Args:
        sw: a job of one module a rank; its ``steps`` are the stand-ins' from now on.
        schedulers: labels in ``sw.state`` of learning-rate schedulers.

    Returns:
        Instances of ``nn.Module``, ``Optimizer`` and ``LRScheduler``. The model's first forward of a step raises
        ``SystemExit``, with the code of a run that was stopped and saved, where the job has no more steps.

    Raises:
        StandInError: there is not one of each.
    """
    there = sw.state
    problems = [f"sw.state has no {label!r}; it has {sorted(there)}" for label in schedulers if label not in there]
    if len(sw.parts) != 1:
        problems.append(f"this rank has {len(sw.parts)} modules: build one, or write a loop of sw.steps")
    if problems:
        raise StandInError("; ".join(problems))
    edges = _Edges(sw)
    found = [_Model(lambda: sw.model, edges), _Optimizer(lambda: sw.optimizer, edges)]
    return (*found, *(_Scheduler(lambda label=label: sw.state[label], edges) for label in schedulers))
