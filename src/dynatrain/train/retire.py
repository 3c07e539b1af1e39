"""Handles from before a switch fail loudly, and say which layout they belonged to."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from dynatrain.train.live import Entry


class RetiredHandleError(RuntimeError):
    """Use of a module, optimizer, scheduler or parameter that a switch replaced."""


def _complain(args: Any) -> NoReturn:
    for value in args if isinstance(args, tuple | list) else [args]:
        name = getattr(value, "__dict__", {}).get("_retired")
        if name is not None:
            raise RetiredHandleError(name)
    raise RetiredHandleError("a tensor from before a switch was used; take it from the Switcher again")


class _Retired(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _complain(args)


class _RetiredDTensor(DTensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _complain(args)

    # DTensor's own methods do not pass __torch_function__.
    def to_local(self, **_: Any) -> NoReturn:
        """Raise."""
        _complain(self)

    def full_tensor(self, **_: Any) -> NoReturn:
        """Raise."""
        _complain(self)

    def redistribute(self, *_: Any, **__: Any) -> NoReturn:
        """Raise."""
        _complain(self)


class _RetiredParameter(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _complain(args)


def retire(
    parts: list[nn.Module],
    optimizer: torch.optim.Optimizer,
    schedulers: Mapping[str, Any],
    found: Mapping[str, Entry],
    leaves: Mapping[str, torch.Tensor],
    why: str,
) -> None:
    """Make every use of an old world's handles raise :class:`RetiredHandleError` with their name.

    Args:
        parts: modules; calling one or a module inside it raises from now on.
        optimizer: its ``step`` raises from now on.
        schedulers: learning-rate schedulers by label; likewise.
        found: parameters and buffers; every operation on one or on its optimizer state raises. Views of them that
            the user kept are not seen, and have lost their memory.
        leaves: what registered objects held of the model's tensors, by name for people; likewise.
        why: what replaced them.
    """
    for number, part in enumerate(parts):
        part.forward = _dead(f"model part {number} {why}")  # type: ignore[method-assign]
        for path, module in part.named_modules():
            dead = _dead(f"module {path} {why}" if path else f"model part {number} {why}")
            # Before FSDP2's own hook, which would gather from storage that is gone.
            module.register_forward_pre_hook(dead, prepend=True, with_kwargs=True)
            if isinstance(module, FSDPModule):
                module.unshard = dead  # type: ignore[method-assign]
    optimizer.step = _dead(f"the optimizer {why}")  # type: ignore[method-assign]
    for label, scheduler in schedulers.items():
        scheduler.step = _dead(f"{label} {why}")
    for name, value in tensors_of(found, optimizer, leaves).items():
        _hide(value, f"{name} {why}")


class Hidden:
    """Handles whose memory is away: every use of them raises until :meth:`show`.

    Args:
        parts: modules.
        held: tensors by name: of :func:`tensors_of`.
        why: where their memory is.
    """

    def __init__(self, parts: Sequence[nn.Module], held: Mapping[str, torch.Tensor], why: str) -> None:
        self._hooks: list[RemovableHandle] = []
        self._sharded: list[FSDPModule] = []
        for number, part in enumerate(parts):
            for path, module in part.named_modules():
                dead = _dead(f"module {path} {why}" if path else f"model part {number} {why}")
                self._hooks.append(module.register_forward_pre_hook(dead, prepend=True, with_kwargs=True))
                if isinstance(module, FSDPModule):
                    module.unshard = dead  # type: ignore[method-assign]
                    self._sharded.append(module)
        self._classes = [(value, value.__class__) for value in {id(value): value for value in held.values()}.values()]
        for name, value in held.items():
            _hide(value, f"{name} {why}")

    def show(self) -> None:
        """They are what they were."""
        for hook in self._hooks:
            hook.remove()
        for module in self._sharded:
            del module.unshard
        for value, kind in self._classes:
            value.__class__ = kind
            del value._retired  # type: ignore[attr-defined]  # noqa: SLF001


def tensors_of(
    found: Mapping[str, Entry], optimizer: torch.optim.Optimizer, leaves: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A world's tensors by name for people: parameters, buffers, optimizer state, and those of registered objects."""
    held = {name: entry.value for name, entry in found.items()}
    for name, entry in found.items():
        held |= {f"{key} of {name}": value for key, value in optimizer.state.get(entry.value, {}).items()}
    return held | dict(leaves)


def _hide(value: torch.Tensor, why: str) -> None:
    value._retired = why  # type: ignore[attr-defined]  # noqa: SLF001
    if isinstance(value, DTensor):
        value.__class__ = _RetiredDTensor
    else:
        value.__class__ = _RetiredParameter if isinstance(value, nn.Parameter) else _Retired


def _dead(what: str) -> Any:
    def raises(*_: Any, **__: Any) -> NoReturn:
        raise RetiredHandleError(f"{what}; take it from the Switcher again")

    return raises
