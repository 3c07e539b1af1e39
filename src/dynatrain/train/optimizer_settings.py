"""What an optimizer keeps on itself, beside groups and state: a count of steps, a factor.

``build`` makes the optimizer anew in every layout. What its plain attributes have become since goes along with a
switch, and into checkpoints; anything else that it has changed on itself is refused by name. The same for modules is
:mod:`dynatrain.train.settings`.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dynatrain.train.optimizers.several import members
from dynatrain.train.plain import UNSEEN, plain, tell, tellable
from dynatrain.train.settings import ABSENT, Held, Key, Settings, changes, require_portable, require_takers
from dynatrain.train.states import UnknownStateError
from dynatrain.train.torch_private import times_written

Kept = dict[str, dict[str, Any]]
"""Plain values by optimizer (as ``optimizer AdamW``) and attribute."""

_TORCHS_OWN = frozenset(vars(torch.optim.Optimizer([{"params": []}], {}))) | {"_opt_called"}  # a scheduler's
_THERE = "param_groups"
"""What stands for the optimizer itself among its settings, so that it is known where it has none."""

_INSTEAD = "keep a tensor in state[param], under a schema, and numbers as plain attributes (self.t = 0), which go along"


def optimizer_settings(optimizer: torch.optim.Optimizer) -> Settings:
    """What all attributes are now that torch's own class has not."""
    now: Settings = {}
    for whose, one in _named(optimizer):
        now[whose, _THERE] = UNSEEN
        private = type(one).__module__.startswith("torch.")
        for attribute, value in vars(one).items():
            if attribute not in _TORCHS_OWN and not (private and attribute.startswith("_")):
                now[whose, attribute] = _seen(value)
    return now


def require_movable(built: Settings, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what an optimizer has changed on itself and nothing carries.

    Args:
        built: its settings right after build.
        optimizer: as it is now.

    Raises:
        UnknownStateError: all of it, by name.
    """
    now = optimizer_settings(optimizer)
    lost = [
        f"{which} of {whose}"
        for whose, which in sorted(_held(built) | _held(now))
        if _version(built.get((whose, which))) != _version(now.get((whose, which)))
    ]
    if lost:
        raise UnknownStateError(f"{', '.join(lost)}: changed since build, and carried to no other layout: {_INSTEAD}")


def refuse_meta_tensors(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a build on meta whose optimizer keeps tensors on itself, which nothing would fill.

    Raises:
        UnknownStateError: all of them, by name.
    """
    lost = [
        f"{attribute} of {whose}"
        for whose, one in _named(optimizer)
        for attribute, value in vars(one).items()
        if attribute not in _TORCHS_OWN and any(tensor.is_meta for tensor in _tensors(value))
    ]
    if lost:
        raise UnknownStateError(
            f"{', '.join(lost)}: tensors on an optimizer itself; every later layout is built on meta, where they have "
            f"no values: {_INSTEAD}"
        )


def optimizer_changes(built: Settings, optimizer: torch.optim.Optimizer) -> dict[Key, tuple[Any, Any]]:
    """``{key: (value right after build, value now)}`` of the plain ones that are others now."""
    now = optimizer_settings(optimizer)
    held = _held(built) | _held(now)
    before, after = ({key: value for key, value in of.items() if key not in held} for of in (built, now))
    return changes(before, after)


def kept_by(built: Settings, optimizer: torch.optim.Optimizer) -> Kept:
    """What a checkpoint has of an optimizer's own attributes: the plain ones that were set since build."""
    found: Kept = {}
    for (whose, which), (_, value) in optimizer_changes(built, optimizer).items():
        found.setdefault(whose, {})[which] = tell(value) if tellable(value) else value
    return found


def require_kept(built: Settings, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what no file could hold.

    Raises:
        UnknownStateError: all of it, by name.
    """
    require_movable(built, optimizer)
    require_portable(optimizer_changes(built, optimizer))


def take_kept(built: Settings, optimizer: torch.optim.Optimizer, kept: Mapping[str, Mapping[str, Any]]) -> None:
    """Set what a checkpoint has of an optimizer's own attributes; the others are again as build made them."""
    before = {key: value for key, (value, _) in optimizer_changes(built, optimizer).items()}
    told = {(whose, which): value for whose, values in kept.items() for which, value in values.items()}
    _set(optimizer, before | told)


def set_optimizer(optimizer: torch.optim.Optimizer, built: Settings, changed: Mapping[Key, tuple[Any, Any]]) -> None:
    """Set on the next layout's optimizer what was set on the old one's.

    Args:
        optimizer: as it was built; mutated.
        built: its settings.
        changed: what all settings, of modules too, were changed to.

    Raises:
        UnknownStateError: build makes them otherwise in this layout than in the old one.
    """
    ours = {key: pair for key, pair in changed.items() if (key[0], _THERE) in built}
    require_takers(ours, built, travels=True)
    _set(optimizer, {key: now for key, (_, now) in ours.items()})


def unlike_optimizers(optimizer: torch.optim.Optimizer, kept: Mapping[str, Any]) -> tuple[str, ...]:
    """Why what a checkpoint has of optimizers' own attributes is not of those here; empty where it is."""
    here = {whose for whose, _ in _named(optimizer)}
    return tuple(
        f"it has {', '.join(sorted(kept[whose]))} of {whose}, which is not here" for whose in sorted(kept.keys() - here)
    )


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    found = members(optimizer)
    kinds = [type(one).__name__ for one in found]
    for number, (one, kind) in enumerate(zip(found, kinds, strict=True)):
        yield f"optimizer {kind}" if kinds.count(kind) == 1 else f"optimizer {number} ({kind})", one


def _seen(value: Any) -> Any:
    """A value as it is compared: by what is in it; of objects and functions only that they are there."""
    if isinstance(value, torch.Tensor | list | tuple | dict | set):
        return Held(value, zlib.crc32(_content(value).encode()))
    return plain(value)


def _content(value: Any) -> str:
    """Another text where a plain value or a tensor in it is another. Parameters are the model's."""
    if isinstance(value, dict):
        return f"{{{[(repr(key), _content(one)) for key, one in value.items()]}}}"
    if isinstance(value, list | tuple | set):
        return f"{type(value).__name__}{[_content(one) for one in value]}"
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return f"tensor {id(value)} {times_written(value)}"
    return type(value).__name__ if plain(value) is UNSEEN else repr(value)


def _held(settings: Settings) -> set[Key]:
    return {key for key, value in settings.items() if isinstance(value, Held)}


def _version(value: Any) -> int | None:
    return value.version if isinstance(value, Held) else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, torch.nn.Parameter):
            yield value
    elif isinstance(value, list | tuple | set):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _set(optimizer: torch.optim.Optimizer, values: Mapping[Key, Any]) -> None:
    named = dict(_named(optimizer))
    for (whose, which), value in values.items():
        if whose not in named:
            continue
        if not isinstance(value, str) or value != ABSENT:
            setattr(named[whose], which, value)
        elif hasattr(named[whose], which):
            delattr(named[whose], which)
