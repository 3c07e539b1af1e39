"""Values that can be set on another object as they are: which these are, copied, compared, and told to other ranks.

Plain are truth values, numbers (numpy's and other subclasses, too), texts, None, members of enumerations, types, and
tuples, lists, dictionaries and sets of these, up to so many values.
"""

from collections.abc import Mapping
from enum import Enum
from numbers import Number
from operator import is_
from typing import Any

import numpy as np
import torch

SCALARS = (bool, int, float, str, type(None))
"""What JSON says as it is."""
_BY_REFERENCE = (Number, str, bytes, np.generic, Enum, type, torch.dtype)
"""Never written, so that two modules may have the same one."""
_CONTAINERS = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset}
_KINDS = {*_CONTAINERS.values(), dict}
MOST = 256
"""Values in one container that are looked at: larger ones are tables, and take time inside the stall."""
_LEVELS = 4

UNSEEN = object()
"""Stands for a value that is not looked at: an object, a container of objects, or of too much."""


def plain(value: Any) -> Any:
    """``value`` itself where it is plain and never written, a copy of a plain container, else :data:`UNSEEN`."""
    return _plain(value, [MOST], _LEVELS)


def _plain(value: Any, room: list[int], levels: int) -> Any:
    if type(value) in SCALARS:
        return value
    if levels == 0 or not (isinstance(value, tuple) or type(value) in _KINDS):
        return value if isinstance(value, _BY_REFERENCE) else UNSEEN
    room[0] -= len(value)
    if room[0] < 0:
        return UNSEEN
    inside = [*value, *value.values()] if isinstance(value, dict) else list(value)
    copies = [_plain(one, room, levels - 1) for one in inside]
    return UNSEEN if any(one is UNSEEN for one in copies) else _filled(value, inside, copies)


def _filled(value: Any, inside: list[Any], copies: list[Any]) -> Any:
    """A container like ``value``, of ``copies`` of what is ``inside``."""
    if isinstance(value, dict):
        return dict(zip(value, copies[len(value) :], strict=True))
    if isinstance(value, tuple) and all(map(is_, inside, copies)):
        return value  # of whatever subclass
    return type(value)(copies) if type(value) in _CONTAINERS.values() else UNSEEN


def same(one: Any, other: Any) -> bool:
    """Whether two plain values are the same number, text or member; a subclass of a number is the number."""
    if one is other:
        return True
    if type(one) is not type(other):
        one, other = _told_scalar(one), _told_scalar(other)
    if type(one) is not type(other) or isinstance(one, Enum | type | torch.dtype):
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one, other)) and all(map(same, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, set | frozenset):
        return one == other
    return repr(one) == repr(other)  # nan is nan, and 0.0 is not -0.0


def tellable(value: Any) -> bool:
    """Whether :func:`tell` can say a plain value: it has no types and no members of enumerations."""
    if isinstance(value, dict):
        return all(map(tellable, value)) and all(map(tellable, value.values()))
    if type(value) in _CONTAINERS.values():
        return all(map(tellable, value))
    return type(_told_scalar(value)) in SCALARS


def tell(value: Any) -> Any:
    """A :func:`tellable` value as JSON has it."""
    if isinstance(value, dict):
        return {"dict": [[tell(key), tell(one)] for key, one in value.items()]}
    for name, kind in _CONTAINERS.items():
        if type(value) is kind:
            return {name: [tell(one) for one in value]}
    return _told_scalar(value)


def hear(value: Any) -> Any:
    """The value of which :func:`tell` made ``value``; numbers are Python's."""
    if not isinstance(value, Mapping):
        return value
    ((name, inside),) = value.items()
    if name == "dict":
        return {hear(key): hear(one) for key, one in inside}
    return _CONTAINERS[name](hear(one) for one in inside)


def _told_scalar(value: Any) -> Any:
    """A number or text as Python's own; anything else as it is."""
    if type(value) in SCALARS or isinstance(value, Enum):
        return value
    if isinstance(value, np.generic):
        return value.item()
    return next((kind(value) for kind in (int, float, str) if isinstance(value, kind)), value)
