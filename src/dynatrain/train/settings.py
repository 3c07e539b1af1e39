"""What a loop has set since ``build``, and no tensor holds: carried to the next modules, or refused by name.

``build`` makes modules anew in every layout. What was set afterwards (a dropout's ``p``, ``eval()`` of a frozen part, a
flag of a data-dependent initialisation, ``requires_grad``, a mark on a parameter, FSDP2's switches) is known by
comparing with what was there right after ``build``. It goes to the module, parameter or FSDP unit of the same name, on
the rank that has it in the next layout: from itself where it had it, else from what all ranks tell each other.

Carried are plain values (:mod:`dynatrain.train.plain`), and those of objects that a module holds, such as its
``config``; types and members of enumerations where modules stay on their ranks. Refused by name: a tensor kept in an
attribute since ``build``; a function, which may belong to the old module; an object in the place of a plain value; what
has no counterpart in the next layout; and what ``build`` itself sets differently there, as it cannot be told which of
the two counts.
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from typing import Any

import torch

from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.plain import UNSEEN, same, tellable
from dynatrain.train.plain import hear as hear_plain
from dynatrain.train.plain import tell as tell_plain
from dynatrain.train.states import UnknownStateError

Key = tuple[str, str]
"""Whose setting (``module blocks.0.drop``, ``parameter out.weight``, ``FSDP unit blocks.0``), and which."""

ABSENT = "(not there)"
"""Stands for the value of a setting that is not there."""

UNIT = "FSDP unit "
"""How FSDP2's units are called."""

_SCHEDULED = ("requires_gradient_sync", "requires_all_reduce", "reshard_after_backward")
_MEANT = (Number, str, Enum, tuple)
"""Values that somebody means, where None may stand for what is not there yet."""
RESULT = object()
"""Stands for a result of the last forward, which the next one makes again."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A value that is known by its identity, and a tensor also by how often it was written."""

    value: object
    version: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Inside:
    """What an object that a module holds is set to, one level deep; one for all modules that hold it."""

    thing: object
    values: dict[str, Any]


Settings = dict[Key, Any]
"""Values by key: plain ones as they are or in a copy, objects in :class:`Inside`, all else that is looked at in a
:class:`Held`. A setting of an object is called with a dot: ``config.use_cache``."""


def changes(built: Settings, now: Settings) -> dict[Key, tuple[Any, Any]]:
    """``{key: (value right after build, value now)}`` of what was set since.

    Raises:
        UnknownStateError: what could be carried to no other layout, all of it, by name.
    """
    found: dict[Key, tuple[Any, Any]] = {}
    problems: list[str] = []
    known: dict[tuple[int, int], list[tuple[str, Any, Any]]] = {}
    # Nearly all are the very objects that were there: a switch asks thousands inside the stall.
    differ = [key for key, value in now.items() if value is not built.get(key, ABSENT)] + [*(built.keys() - now.keys())]
    for key in sorted(differ):
        before, value = built.get(key, ABSENT), now.get(key, ABSENT)
        if isinstance(before, Inside) and isinstance(value, Inside):
            first = (pair := (id(before), id(value))) not in known
            if first:
                known[pair] = _changes_inside(before, value)
            inside = [((key[0], f"{key[1]}{which}"), *of) for which, *of in known[pair]]
        else:
            first, inside = True, [] if _same(before, value) else [(key, before, value)]
        for one, was, is_now in inside:
            if isinstance(is_now, Held | Inside) or is_now is UNSEEN or is_now is RESULT:
                problems += _refusal(one, was, is_now) if first else []
            else:
                found[one] = (was, is_now)
    if problems:
        raise UnknownStateError("; ".join(problems))
    return found


def _changes_inside(before: Inside, now: Inside) -> list[tuple[str, Any, Any]]:
    """``(which, value then, value now)`` of an object's settings, or of the object where another one is there now."""
    if type(before.thing) is not type(now.thing):
        return [("", before, now)]
    names = sorted(before.values.keys() | now.values.keys())
    pairs = [(name, before.values.get(name, ABSENT), now.values.get(name, ABSENT)) for name in names]
    return [(f".{name}", was, is_now) for name, was, is_now in pairs if not _same(was, is_now)]


def _refusal(key: Key, before: Any, now: Any) -> list[str]:
    """Why a value that cannot be carried may not be left behind; empty where it may."""
    whose, which = key
    if isinstance(now, Held) and isinstance(now.value, torch.Tensor):
        why = (
            f"{which} of {whose} is a tensor that was put there, or written, since build, and is neither parameter "
            "nor buffer: register a buffer (persistent=False where no file is to have it), or delete it after use"
        )
        return [why]
    replaced = isinstance(before, Inside) and isinstance(now, Inside)
    meant = isinstance(before, _MEANT) and before != ABSENT and now is not RESULT
    if not (isinstance(now, Held) or replaced or meant):
        return []  # a container, an object; what a forward has kept, in the place of nothing
    what = "what cannot be carried" if now is UNSEEN else _brief(now)
    return [f"{which} of {whose} was set since build, to {what}: set it in build"]


def not_shared(
    changed: Mapping[Key, tuple[Any, Any]], now: Settings, next_built: Settings
) -> dict[Key, tuple[Any, Any]]:
    """``changed`` without what objects are set to that the next layout's modules hold, too: no ``build`` made them.

    Args:
        changed: since the old world's build.
        now: the old world's settings.
        next_built: the next world's.
    """
    there = {id(value.thing) for value in next_built.values() if isinstance(value, Inside)}

    def stays(key: Key) -> bool:
        whole = now.get((key[0], key[1].partition(".")[0]))
        return isinstance(whole, Inside) and id(whole.thing) in there

    return {key: pair for key, pair in changed.items() if not stays(key)}


def of_the_loop(changed: Mapping[Key, tuple[Any, Any]]) -> dict[Key, tuple[Any, Any]]:
    """``changed`` in a pipeline, without what torch's schedules set on FSDP units by themselves in each step."""
    return {key: pair for key, pair in changed.items() if not (key[0].startswith(UNIT) and key[1] in _SCHEDULED)}


def require_portable(changed: Mapping[Key, tuple[Any, Any]]) -> None:
    """Refuse what could not be told to another rank.

    Raises:
        UnknownStateError: all of it, by name.
    """
    if stuck := [
        f"{which} of {whose}" for (whose, which), (_, now) in changed.items() if now is not ABSENT and not tellable(now)
    ]:
        raise UnknownStateError(
            f"{', '.join(stuck)}: set since build to what cannot follow to another stage or process: set it in build"
        )


def tell(changed: Mapping[Key, tuple[Any, Any]]) -> list[list[Any]]:
    """What this rank tells all others before a switch, as JSON values; for :func:`hear`."""
    return [
        [*key, *(tell_plain(value) if tellable(value) else ABSENT for value in pair)] for key, pair in changed.items()
    ]


def hear(
    told: Sequence[list[list[Any]]],
    mine: Mapping[Key, tuple[Any, Any]],
    catalogue: Catalogue,
    ownership: Ownership,
    *,
    travels: bool,
) -> dict[Key, tuple[Any, Any]]:
    """This rank's changes, and where modules travel everybody's, out of all ranks' :func:`tell`.

    Args:
        told: by rank of the old world, or by holder.
        mine: this rank's own.
        catalogue: all tensors.
        ownership: the old one, which says who has a parameter.
        travels: a rank may get modules that it had not.

    Raises:
        SwitchAbortedError: a parameter's setting is not equal on all ranks that have it, or what is to travel is not
            equal; by name, on every rank alike.
    """
    by_key: dict[Key, dict[int, tuple[Any, Any]]] = {}
    for rank, lines in enumerate(told):
        for whose, which, before, now in lines:
            by_key.setdefault((whose, which), {})[rank] = (hear_plain(before), hear_plain(now))
    holders = {
        f"parameter {name}": [rank for rank in range(len(told)) if ownership.box(tensor, rank) is not None]
        for tensor in catalogue
        for name in {tensor.name, tensor.within}
        if any(whose == f"parameter {name}" for whose, _ in by_key)
    }
    problems = []
    for key, of in sorted(by_key.items()):
        first, *_ = of
        having = holders.get(key[0], of)
        others = [rank for rank in having if rank not in of or not all(map(_same, of[rank], of[first]))]
        if others and (travels or key[0] in holders):
            problems.append(f"{key[1]} of {key[0]} is not equal on all ranks: ranks {others} differ from rank {first}")
    if problems:
        raise SwitchAbortedError("; ".join(problems))
    everybody = {key: pair for key, of in by_key.items() for pair in of.values()} if travels else {}
    return everybody | dict(mine)


def require_takers(changed: Mapping[Key, tuple[Any, Any]], built: Settings, *, travels: bool) -> None:
    """Refuse changes that the next world cannot take over.

    Args:
        changed: since the old world's build.
        built: the next world's settings right after its build.
        travels: modules may have gone to other ranks, so that their absence here says nothing.

    Raises:
        UnknownStateError: all of it, by name.
    """
    problems = []
    owners = {whose for whose, _ in built}
    for (whose, which), (before, now) in changed.items():
        if whose not in owners:
            if not travels:
                problems.append(f"{which} of {whose} was set since build, and the next layout has no {whose}")
        elif (there := _setting(built, whose, which)) is UNSEEN and before is not UNSEEN:
            problems.append(
                f"{which} of {whose} was set to {_brief(now)} since build, and the next layout has no such object "
                "there: set it in build"
            )
        elif not (_same(there, before) or _same(there, now)):
            problems.append(
                f"{which} of {whose} was set to {_brief(now)} since build, which makes it {_brief(before)} in this "
                f"layout and {_brief(there)} in the next: let build alone set it, or make it equal in both"
            )
    if problems:
        raise UnknownStateError("; ".join(problems))


def _setting(built: Settings, whose: str, which: str) -> Any:
    """One setting, also inside an object; UNSEEN where that is not there, or is not looked at."""
    thing, dot, inside = which.partition(".")
    if (whose, which) in built or not dot:
        return built.get((whose, which), ABSENT)
    whole = built.get((whose, thing))
    return whole.values.get(inside, ABSENT) if isinstance(whole, Inside) else UNSEEN


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Held) and isinstance(other, Held):
        return one.value is other.value and one.version == other.version
    if isinstance(one, Inside) and isinstance(other, Inside):
        return type(one.thing) is type(other.thing)
    return same(one, other)


def _brief(value: Any) -> str:
    if isinstance(value, Held):
        return type(value.value).__name__
    return type(value.thing).__name__ if isinstance(value, Inside) else reprlib.repr(value)
