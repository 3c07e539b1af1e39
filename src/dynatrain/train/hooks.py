"""Hooks that the user registered: carried to the new modules and optimizer, or refused by name.

Hooks that ``build`` registers are made anew by every build. What was registered afterwards is known by its number:
torch numbers all hooks of a process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import nn

from dynatrain.models.names import strip_wrappers
from dynatrain.train.live import Entry
from dynatrain.train.module_settings import kind_of
from dynatrain.train.optimizers.several import members
from dynatrain.train.torch_private import Hook, hooks_of

REDUCERS = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Wrappers that reduce gradients by hooks on the very parameters that they were made with."""


class UnknownHookError(ValueError):
    """Hooks that no switch can carry: all of them, by the name of what they sit on."""


def built_hooks(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Numbers of all hooks there are; asked right after ``build``, they are build's own."""
    owners = [*members(optimizer), *(module for part in parts for module in part.modules())]
    return frozenset(hook.number for owner in owners for hook in hooks_of(owner))


def check_hooks(
    parts: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    found: Mapping[str, Entry],
    built: frozenset[int],
    *,
    staged: bool,
) -> None:
    """Refuse hooks that could not be carried, also those of wrappers whose new parameters would have none, silently.

    Args:
        parts: a world's modules.
        optimizer: theirs.
        found: their tensors.
        built: numbers of the hooks that ``build`` registered.
        staged: whether pipeline stages come in: a module may then go to a rank that has no such hook.

    Raises:
        UnknownHookError: with every one of them.
    """
    problems = []
    for _, where, hook in _users(parts, optimizer, built):
        if not hook.register:
            problems.append(f"{hook} on {where} is of a kind that cannot be carried: use a forward or backward hook")
        elif staged and where.startswith("module "):
            problems.append(f"{hook} on {where} could not follow it to another stage: register it in build")
    problems += [
        f"{type(module).__name__} around module {path or '(the whole)'} hangs on its parameters, of which each layout "
        "has others; use fully_shard(module, mesh=mesh['dp', 'fsdp']), which on dp alone reduces as it does"
        for part in parts
        for path, module in part.named_modules()
        if type(module).__name__ in REDUCERS
    ]
    # Build's own, too: a switch gives the modules that build made other parameter objects.
    problems += [
        f"{hook} on parameter {name} cannot be carried, each layout has another parameter object: use a module hook"
        for name, entry in found.items()
        for hook in hooks_of(entry.value)
    ]
    if problems:
        raise UnknownHookError("; ".join(problems))


def carry_hooks(old: Any, new: Any) -> None:
    """Register the user's hooks of world ``old`` on the modules and the optimizer of world ``new``.

    Modules are the same where their paths are, or else where these are without wrappers, of which the outermost counts;
    :func:`check_hooks` has let no pipeline stages pass.
    A hook that is bound to a module, to the optimizer or to what a factory made (a method, a ``partial`` over one, the
    module itself) is bound to its namesake. What a factory has registered again by itself is there once.
    Handles from the first registration belong to the old modules: their ``remove()`` has no effect any more.

    Raises:
        UnknownHookError: there is no namesake; with every one of them.
    """
    carried = list(_users(old.parts, old.optimizer, old.built_hooks))
    if not carried:
        return
    targets: dict[str, Any] = {}
    named = [(*names(), owner) for names, owner in _owners(new.parts, new.optimizer)]
    for _, bare, owner in named:
        targets.setdefault(bare, owner)
    targets |= {where: owner for where, _, owner in named}
    twins, problems = _Twins(old, new, named), []
    again = {
        id(owner): [hook.call for hook in hooks_of(owner) if hook.number not in new.built_hooks]
        for owner in targets.values()
    }
    for where, bare, hook in carried:
        owner = targets.get(where, targets.get(bare))
        if owner is None:
            problems.append(f"{hook} on {where}: the next layout has no {bare}, register it in build")
            continue
        call = twins.of(hook.call)
        if twins.lost:
            problems.append(
                f"{hook} on {where} is bound to {', '.join(twins.lost)}, which the next layout has not: register it in "
                "build, or bind it to an object of your own"
            )
            twins.lost.clear()
        elif call not in again[id(owner)]:
            getattr(owner, hook.register)(call, **hook.options)
    if problems:
        raise UnknownHookError("; ".join(problems))


class _Twins:
    """What stands in a new world for the modules, the optimizer and the factories' products of an old one.

    Args:
        old: the old world.
        new: the new one.
        named: its modules and optimizers, outermost wrappers first, each with its place and the same without wrappers.

    Attributes:
        lost: what was asked for and has no namesake, for people.
    """

    def __init__(self, old: Any, new: Any, named: Sequence[tuple[str, str, Any]]) -> None:
        self.lost: list[str] = []
        self._named = named
        self._places = {id(owner): names for names, owner in _owners(old.parts, old.optimizer)}
        self._made = {
            id(thing): new.objects.get(label)
            for label, thing in old.objects.items()
            if new.objects.get(label) is not thing
        }

    def of(self, thing: Any) -> Any:
        """``thing`` with twins in the place of what it is, or is bound to; itself where it is bound to nothing old."""
        if id(thing) in self._places:
            return self._namesake(thing)
        if id(thing) in self._made:
            return self._made[id(thing)]
        if isinstance(thing, MethodType):
            owner = self.of(thing.__self__)
            return thing if owner is thing.__self__ else MethodType(thing.__func__, owner)
        if isinstance(thing, partial):
            before = (thing.func, *thing.args, *thing.keywords.values())
            func, *rest = after = [self.of(one) for one in before]
            if all(map(is_, before, after)):
                return thing
            words = dict(zip(thing.keywords, rest[len(thing.args) :], strict=True))
            return type(thing)(func, *rest[: len(thing.args)], **words)
        return thing

    def _namesake(self, thing: Any) -> Any:
        """A wrapper has the name of what is in it: the one of the same class, else the innermost."""
        where, bare = self._places[id(thing)]()
        alike = [owner for _, name, owner in self._named if name == bare]
        if not alike:
            self.lost.append(where)
            return thing
        return next((owner for owner in alike if kind_of(owner) is kind_of(thing)), alike[-1])


def _users(
    parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, built: frozenset[int]
) -> Iterator[tuple[str, str, Hook]]:
    """Hooks registered since ``build``, without those that torch registers for itself when it first runs."""
    for names, owner in _owners(parts, optimizer):
        for hook in hooks_of(owner):
            if hook.number not in built and not str(getattr(hook.call, "__module__", "")).startswith("torch."):
                yield *names(), hook


def _owners(
    parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Callable[[], tuple[str, str]], Any]]:
    """``(what gives its place, and the same without wrappers; module or optimizer)``."""
    for number, part in enumerate(parts):
        of_part = f" of part {number}" if len(parts) > 1 else ""
        for path, module in part.named_modules():
            yield partial(_place, part, path, of_part), module
    for number, one in enumerate(members(optimizer)):
        where = f"optimizer {number - 1} of several" if number else "the optimizer"
        yield partial(_twice, where), one


def _place(part: nn.Module, path: str, of_part: str) -> tuple[str, str]:
    return f"module {path}{of_part}", f"module {strip_wrappers(part, path)}{of_part}"


def _twice(where: str) -> tuple[str, str]:
    return where, where
