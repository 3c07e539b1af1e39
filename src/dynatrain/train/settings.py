"""What a loop has set since ``build``, and no tensor holds: carried to the next modules, or refused by name.

``build`` makes modules anew in every layout. What was set afterwards (a dropout's ``p``, ``eval()`` of a frozen part, a
flag of a data-dependent initialisation, ``requires_grad``, a mark on a parameter, FSDP2's switches) is known by
comparing with what was there right after ``build``. It goes to the module, parameter or FSDP unit of the same name, on
the rank that has it in the next layout: from itself where it had it, else from what all ranks tell each other.

Carried are truth values, numbers, texts and None; types too, where modules stay on their ranks. Refused by name: a
tensor kept in an attribute since ``build``; a function, which may belong to the old module; what has no counterpart in
the next layout; and what ``build`` itself sets differently there, as it cannot be told which of the two counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.states import UnknownStateError

Key = tuple[str, str]
"""Whose setting (``module blocks.0.drop``, ``parameter out.weight``, ``FSDP unit blocks.0``), and which."""

ABSENT = "(not there)"
"""Stands for the value of a setting that is not there."""

UNIT = "FSDP unit "
"""How FSDP2's units are called."""

_SCHEDULED = ("requires_gradient_sync", "requires_all_reduce", "reshard_after_backward")
_PLAIN = (bool, int, float, str, type(None))
_BY_REFERENCE = (type, torch.dtype)
UNSEEN = object()
"""Stands for a value that is not looked at: a container, an object, a result of the last forward."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A value that is known by its identity, and a tensor also by how often it was written."""

    value: object
    version: int = 0


Settings = dict[Key, Any]
"""Values by key: plain ones and types as they are, all else that is looked at in a :class:`Held`."""


def changes(built: Settings, now: Settings) -> dict[Key, tuple[Any, Any]]:
    """``{key: (value right after build, value now)}`` of what was set since.

    Raises:
        UnknownStateError: what could be carried to no other layout, all of it, by name.
    """
    found, problems = {}, []
    # Nearly all are the very objects that were there: a switch asks thousands inside the stall.
    differ = {key for key, value in now.items() if value is not built.get(key, ABSENT)} | (built.keys() - now.keys())
    for key in sorted(key for key in differ if not _same(built.get(key, ABSENT), now.get(key, ABSENT))):
        (whose, which), value = key, now.get(key, ABSENT)
        if not isinstance(value, Held):
            found[key] = (built.get(key, ABSENT), value)
        elif isinstance(value.value, torch.Tensor):
            problems.append(
                f"{which} of {whose} is a tensor that was put there, or written, since build, and is neither parameter "
                "nor buffer: register a buffer (persistent=False where no file is to have it), or delete it after use"
            )
        else:
            problems.append(f"{which} of {whose} was set since build, to {type(value.value).__name__}: set it in build")
    if problems:
        raise UnknownStateError("; ".join(problems))
    return found


def of_the_loop(changed: Mapping[Key, tuple[Any, Any]]) -> dict[Key, tuple[Any, Any]]:
    """``changed`` in a pipeline, without what torch's schedules set on FSDP units by themselves in each step."""
    return {key: pair for key, pair in changed.items() if not (key[0].startswith(UNIT) and key[1] in _SCHEDULED)}


def require_portable(changed: Mapping[Key, tuple[Any, Any]]) -> None:
    """Refuse what could not be told to another rank.

    Raises:
        UnknownStateError: all of it, by name.
    """
    if stuck := [f"{which} of {whose}" for (whose, which), (_, now) in changed.items() if type(now) not in _PLAIN]:
        raise UnknownStateError(
            f"{', '.join(stuck)}: set since build to what cannot follow to another stage or process: set it in build"
        )


def tell(changed: Mapping[Key, tuple[Any, Any]]) -> list[list[Any]]:
    """What this rank tells all others before a switch, as JSON values; for :func:`hear`."""
    return [[*key, *(value if type(value) in _PLAIN else ABSENT for value in pair)] for key, pair in changed.items()]


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
            by_key.setdefault((whose, which), {})[rank] = (before, now)
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
        elif not (_same(there := built.get((whose, which), ABSENT), before) or _same(there, now)):
            problems.append(
                f"{which} of {whose} was set to {_brief(now)} since build, which makes it {_brief(before)} in this "
                f"layout and {_brief(there)} in the next: let build alone set it, or make it equal in both"
            )
    if problems:
        raise UnknownStateError("; ".join(problems))


def carried(value: Any) -> bool:
    """Whether a value can be set on another object as it is."""
    return type(value) in _PLAIN or isinstance(value, _BY_REFERENCE)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Held) and isinstance(other, Held):
        return one.value is other.value and one.version == other.version
    if type(one) in _PLAIN:
        return (type(one) is type(other) and repr(one) == repr(other)) or other is UNSEEN  # by text: nan is nan
    return one is other


def _brief(value: Any) -> str:
    return repr(value) if type(value) in _PLAIN else type(value.value if isinstance(value, Held) else value).__name__
