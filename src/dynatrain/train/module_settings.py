"""Settings of live modules, parameters and FSDP2 units: read, and set. See :mod:`dynatrain.train.settings`."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dynatrain.models.names import WRAPPERS, NameRule, strip_wrappers
from dynatrain.train.live import Entry
from dynatrain.train.plain import MOST, SCALARS, UNSEEN, plain
from dynatrain.train.settings import ABSENT, RESULT, UNIT, Held, Inside, Key, Settings, require_takers
from dynatrain.train.states import UnknownStateError
from dynatrain.train.torch_private import times_written
from dynatrain.train.torch_private_fsdp import fsdp_settings, set_fsdp

_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl"}  # this is speed alone
_WRAPPERS = frozenset().union(*WRAPPERS.values())
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial)
_NOT_READ = ("torch.", "dynatrain.", "logging")
"""Whose objects settle by themselves what they are set to."""
_OWNER = "_owner"


class _Plain:
    """An object of Python alone."""


_PLAIN_SIZES = {_Plain.__basicsize__, SimpleNamespace.__basicsize__}


def settings_of(parts: Sequence[nn.Module], found: Mapping[str, Entry], rule: NameRule) -> Settings:
    """All settings of a world's modules, parameters and FSDP units, as they are now."""
    now: Settings = {}
    objects: dict[int, Any] = {}  # what was read of each, by its identity: many modules hold one ``config``
    for name, module in _modules(parts, rule):
        for attribute, value in _attributes(module, objects):
            now.setdefault((f"module {name}", attribute), value)
        if isinstance(module, FSDPModule):
            values, held = fsdp_settings(module)
            now |= {(f"{UNIT}{name}", setting): value for setting, value in values.items()}
            now |= {(f"{UNIT}{name}", setting): Held(value) for setting, value in held.items()}
    for name, entry in found.items():
        if isinstance(entry.value, nn.Parameter):
            now[f"parameter {name}", "requires_grad"] = entry.value.requires_grad
            for attribute, value in vars(entry.value).items():
                now[f"parameter {name}", attribute] = Held(value) if (copy := plain(value)) is UNSEEN else copy
    return now


def apply(
    parts: Sequence[nn.Module],
    found: Mapping[str, Entry],
    rule: NameRule,
    built: Settings,
    changed: Mapping[Key, tuple[Any, Any]],
) -> None:
    """Set on a world's modules, parameters and FSDP units what was changed on those of the old one.

    Args:
        parts: the modules, before their first forward; mutated.
        found: their tensors.
        rule: of canonical names.
        built: their settings right after build.
        changed: what :func:`hear` gave.

    Raises:
        UnknownStateError: as :func:`require_takers`.
    """
    if not changed:
        return
    require_takers(changed, built, travels=True)
    by_owner: dict[str, dict[str, Any]] = {}
    for (whose, which), (_, now) in changed.items():
        by_owner.setdefault(whose, {})[which] = now
    for name, module in _modules(parts, rule):
        values = by_owner.get(f"module {name}", {})
        wrapper = kind_of(module).__name__ in _WRAPPERS
        _set(module, {key: value for key, value in values.items() if key == "training" or not wrapper})
        if isinstance(module, FSDPModule):
            set_fsdp(module, by_owner.get(f"{UNIT}{name}", {}))
    for name, entry in found.items():
        _set(entry.value, by_owner.get(f"parameter {name}", {}))


def refuse_meta(parts: Sequence[nn.Module], found: Mapping[str, Entry]) -> None:
    """Refuse a build on meta whose modules keep plain tensors, which nothing would fill.

    Raises:
        UnknownStateError: all of them, by name.
    """
    known = {id(entry.value) for entry in found.values()}
    lost = [
        f"{name}.{attribute}".removeprefix(".")
        for part in parts
        for name, module in part.named_modules()
        if not _speaks_for_itself(module)
        for attribute, value in vars(module).items()
        if attribute not in _TORCHS_OWN and any(one.is_meta and id(one) not in known for one in _tensors(value))
    ]
    if lost:
        raise UnknownStateError(
            f"{', '.join(lost)}: plain tensors of modules, neither parameters nor buffers; every later layout is built "
            "on meta, where they have no values: register buffers (persistent=False where no file is to have them)"
        )


def _modules(parts: Sequence[nn.Module], rule: NameRule) -> Iterator[tuple[str, nn.Module]]:
    for part in parts:
        for path, module in part.named_modules():
            yield _name(part, path, rule) or "(the model)", module


def _name(part: nn.Module, path: str, rule: NameRule) -> str:
    inside = f"{path}.{_OWNER}" if path else _OWNER
    try:
        name = rule(part, inside)
    except Exception:  # noqa: BLE001 - a rule for tensors alone, such as a table
        name = inside
    name = name if name.endswith(_OWNER) else strip_wrappers(part, inside)
    return name.removesuffix(_OWNER).removesuffix(".")


def _attributes(module: nn.Module, objects: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    kind = kind_of(module)
    if kind.__name__ in _WRAPPERS:
        yield "training", module.training
        return
    private = kind.__module__.startswith("torch.")
    for attribute, value in vars(module).items():
        if attribute in _TORCHS_OWN or (private and attribute.startswith("_")):
            continue
        if type(value) in SCALARS:
            yield attribute, value
        elif id(value) in objects:
            yield attribute, objects[id(value)]
        elif isinstance(value, torch.Tensor) and value.grad_fn is None and not _speaks_for_itself(module):
            yield attribute, Held(value, times_written(value))
        elif (seen := _seen(value)) is not UNSEEN:
            yield attribute, seen
        else:
            objects[id(value)] = inside = _inside(value)
            yield attribute, inside


def _seen(value: Any) -> Any:
    """A value as settings have it, but for tensors that are kept, and objects."""
    if isinstance(value, _FUNCTIONS):
        return Held(value)
    return RESULT if next(_tensors(value), None) is not None else plain(value)


def _inside(thing: Any) -> Any:
    """What an object is set to; UNSEEN where it is not of plain values alone, but keeps tensors or is torch's."""
    kind = type(thing)
    # Of another size than an object of Python alone: what it is, is not all in its attributes, as with a random stream.
    if kind.__basicsize__ not in _PLAIN_SIZES or isinstance(thing, nn.Module) or kind.__module__.startswith(_NOT_READ):
        return UNSEEN
    values = getattr(thing, "__dict__", None)
    if not isinstance(values, dict) or len(values) > MOST:
        return UNSEEN
    found = {name: UNSEEN if isinstance(value, _FUNCTIONS) else _seen(value) for name, value in values.items()}
    return UNSEEN if any(value is RESULT for value in found.values()) else Inside(thing, found)


def _speaks_for_itself(module: nn.Module) -> bool:
    """Whether a module has extra state: what tensors it keeps, that hands over, and sees that it has done so."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def kind_of(module: object) -> type:
    """A module's class as it was before FSDP2 put one of its own in its place."""
    return type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from (one for one in value if isinstance(one, torch.Tensor))
    elif isinstance(value, dict):
        yield from (one for one in value.values() if isinstance(one, torch.Tensor))


def _set(owner: nn.Module | torch.Tensor, values: Mapping[str, Any]) -> None:
    for which, value in values.items():
        thing, dot, inside = which.partition(".")
        if which == "requires_grad":
            owner.requires_grad_(value)
        elif not dot:
            _put(owner, which, value)
        else:
            whole = getattr(owner, thing)
            try:
                _put(whole, inside, value)
            except Exception as error:
                raise UnknownStateError(
                    f"{which} was set since build, and the next {type(whole).__name__} does not take it: {error}; set "
                    "it in build"
                ) from error


def _put(owner: Any, which: str, value: Any) -> None:
    if not isinstance(value, str) or value != ABSENT:
        setattr(owner, which, value)
    elif hasattr(owner, which):
        delattr(owner, which)
