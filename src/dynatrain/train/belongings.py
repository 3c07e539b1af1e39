"""What an object that outlives a layout holds of it: found through its attributes, and through what they hold.

A registered object stays when a switch puts other modules, another optimizer and other parameters in the place of the
old ones. What it holds of them by itself it would go on to use, and nothing would say so: a scheduler that writes the
learning rates of an optimizer that is no longer stepped.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from dynatrain.train.optimizers.several import members
from dynatrain.train.torch_private import local_tensor
from dynatrain.train.world import World

_LEVELS = 6
_MOST = 20_000
"""Things that are looked at: an object may hold a whole data set."""
_ENDS = (str, bytes, int, float, complex, type, ModuleType, FunctionType)
_OURS = "dynatrain."
_TOLD = 3

OPTIMIZER = "the optimizer"
GROUP = "parameter group "
MODULE = "module "


class Belongings:
    """What a layout has bound and the next one has not, by identity.

    Args:
        world: that has it; must live as long as this.
        but: a world whose modules are not meant, though ``world`` has them, too.
        views: whether tensors that lie in a parameter's memory are meant.
    """

    def __init__(self, world: World, *, but: World | None = None, views: bool) -> None:
        self._names = {id(world): "the Switcher's world"}
        for one in members(world.optimizer):
            self._names[id(one)] = OPTIMIZER
            self._names |= {id(group): f"{GROUP}{number}" for number, group in enumerate(one.param_groups)}
        for name, entry in world.found.items():
            self._names[id(entry.value)] = name
        shared = {id(module) for part in but.parts for module in part.modules()} if but else set()
        for part in world.parts:
            named = part.named_modules()
            self._names |= {id(one): f"{MODULE}{path or '(the model)'}" for path, one in named if id(one) not in shared}
        self._places = {_place(entry.value): name for name, entry in world.found.items()} if views else {}
        self._places.pop(0, "")

    def name_of(self, thing: object) -> str:
        """What ``thing`` is of the world, for people; empty where it is not."""
        name = self._names.get(id(thing), "")
        if not name and self._places and isinstance(thing, torch.Tensor):
            name = self._places.get(_place(thing), "")
            return name and f"a view of {name}"
        return name


def held(thing: object, belongings: Belongings) -> dict[str, str]:
    """``{what: where in thing}`` of the belongings that ``thing`` reaches by itself, the nearest first.

    Not by our own objects, such as the Switcher or a stand-in: they know the present layout. Nor by the belongings.
    """
    found: dict[str, str] = {}
    seen = {id(thing)}
    level = deque([("", 0, thing)])
    while level and len(seen) < _MOST:
        path, depth, owner = level.popleft()
        for name, value in _inside(owner):
            if isinstance(value, _ENDS) or id(value) in seen:
                continue
            seen.add(id(value))
            if what := belongings.name_of(value):
                found.setdefault(what, f"{path}{name}".removeprefix("."))
            elif depth + 1 < _LEVELS and not _is_ours(value):
                level.append((f"{path}{name}", depth + 1, value))
            if len(seen) >= _MOST:
                break
    return found


def told(found: Mapping[str, str]) -> str:
    """:func:`held`, for people."""
    first = [f"{what} ({where})" for what, where in list(found.items())[:_TOLD]]
    return ", ".join(first) + (f" and {len(found) - _TOLD} more" if len(found) > _TOLD else "")


def _inside(owner: Any) -> Iterator[tuple[str, Any]]:
    """What ``owner`` holds by itself, and the way there; asks nothing of it that could run its code."""
    if isinstance(owner, torch.Tensor):
        return
    if isinstance(owner, MethodType):
        yield ".__self__", owner.__self__
        return
    if isinstance(owner, partial):
        yield ".func", owner.func
        yield from ((f".args[{number}]", value) for number, value in enumerate(owner.args))
        yield from ((f".{key}", value) for key, value in owner.keywords.items())
        return
    if isinstance(owner, dict):
        yield from (
            (f"[{key!r}]" if isinstance(key, str | int) else "[...]", value) for key, value in list(owner.items())
        )
        yield from (("[...]", key) for key in list(owner))
    elif isinstance(owner, list | tuple | set | frozenset | deque):
        yield from ((f"[{number}]", value) for number, value in enumerate(list(owner)))
    yield from _attributes(owner)


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    own = getattr(owner, "__dict__", None)
    if isinstance(own, dict):
        yield from ((f".{key}", value) for key, value in list(own.items()))
    for kind in type(owner).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else tuple(slots):
            if slot not in {"__dict__", "__weakref__"} and (value := getattr(owner, slot, None)) is not None:
                yield f".{slot}", value


def _is_ours(thing: object) -> bool:
    return any(kind.__module__.startswith(_OURS) for kind in type(thing).__mro__)


def _place(value: torch.Tensor) -> int:
    """Where the memory of a plain or sharded tensor begins; 0 where it has none."""
    local = local_tensor(value)
    if type(local) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer} or local.is_sparse or local.is_meta:
        return 0
    return local.untyped_storage().data_ptr()
