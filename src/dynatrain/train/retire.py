"""Handles from before a switch fail loudly, and say which layout they belonged to."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from dynatrain.train.live import Entry
from dynatrain.train.optimizers.several import members


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


_MODULES = ("train", "eval", "requires_grad_", "state_dict", "load_state_dict", "zero_grad")
"""What a module does besides running, and would do to nobody's benefit."""
_OPTIMIZERS = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
_SCHEDULERS = ("step", "get_last_lr", "state_dict", "load_state_dict")


class _Gone:
    """In the place of an optimizer's groups, and of all that was in them: any use but its print raises."""

    def __init__(self, what: str) -> None:
        vars(self)["_what"] = what

    def __repr__(self) -> str:
        return f"<retired: {vars(self)['_what']}>"

    def __getattr__(self, _name: str) -> NoReturn:
        self._raise()

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        _dead(vars(self)["_what"])()


_USES = """setattr getitem setitem delitem iter len contains bool float int index str format hash call neg abs round
    eq ne lt le gt ge add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv ifloordiv
    mod rmod pow rpow ipow or ror ior"""
for _use in _USES.split():
    setattr(_Gone, f"__{_use}__", _Gone._raise)  # noqa: SLF001


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
        parts: modules; calling one or a module inside it raises from now on, as do ``train``, ``eval``,
            ``requires_grad_``, ``zero_grad``, ``state_dict`` and ``load_state_dict``.
        optimizer: ``step``, ``zero_grad``, ``state_dict``, ``load_state_dict`` and ``add_param_group`` raise from now
            on, as does each use of its ``param_groups``, of whatever kept list or group they are; writing an option
            of a group that was kept itself is not seen.
        schedulers: what factories made, by label; ``step``, ``get_last_lr``, ``state_dict`` and ``load_state_dict``
            raise from now on.
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
            vars(module).update(dict.fromkeys(_MODULES, dead))
            if isinstance(module, FSDPModule):
                module.unshard = dead  # type: ignore[method-assign]
    for one in members(optimizer):
        _retire_optimizer(one, why)
    for label, scheduler in schedulers.items():
        dead = _dead(f"{label} {why}")
        for name in _SCHEDULERS:
            with suppress(AttributeError):  # it has slots
                if hasattr(scheduler, name):
                    setattr(scheduler, name, dead)
    for name, value in tensors_of(found, optimizer, leaves).items():
        _hide(value, f"{name} {why}")


def _retire_optimizer(optimizer: torch.optim.Optimizer, why: str) -> None:
    own = vars(optimizer)
    own.update(dict.fromkeys(_OPTIMIZERS, _dead(f"the optimizer {why}")))
    groups, gone = optimizer.param_groups, _Gone(f"a parameter group of the optimizer {why}")
    for group in groups:
        group.update(dict.fromkeys(group, gone))  # somebody may have kept the group
    groups[:] = [gone for _ in groups]  # or the list
    own["param_groups"] = _Gone(f"the list of parameter groups of the optimizer {why}")


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
