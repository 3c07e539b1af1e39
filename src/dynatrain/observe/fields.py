"""Whether a value read from JSON has the fields of a record: rules as data, and each problem with its place.

A rule is a test of a value; or the rules of an object's fields, by name (``*`` for any name); or, in a list, the rule
of every element of a list.
"""

from collections.abc import Callable, Mapping
from typing import Any

Rule = Callable[[object], bool] | Mapping[str, Any] | list[Any]

ANY = "*"
_MOST = 1 << 62
"""Above every count of ours, and still a number that arrays can hold."""
_SHOWN = 80


def problems_of(where: str, value: object, rule: Rule) -> tuple[str, ...]:
    """What is wrong with ``value``, which stands at ``where``; empty where nothing is."""
    if callable(rule):
        return () if rule(value) else (f"{where} is {shown(value)}, which is not allowed there",)
    if isinstance(rule, list):
        if not isinstance(value, list):
            return (f"{where} is {shown(value)}, not a list",)
        return tuple(problem for i, one in enumerate(value) for problem in problems_of(f"{where}[{i}]", one, rule[0]))
    if not isinstance(value, Mapping):
        return (f"{where} is {shown(value)}, not an object",)
    if ANY in rule:
        return tuple(problem for key in value for problem in problems_of(f"{where}.{key}", value[key], rule[ANY]))
    return (
        *(f"{where} lacks {key!r}" for key in rule if key not in value),
        *(f"{where} has an unknown key {shown(key)}" for key in value if key not in rule),
        *(problem for key in rule if key in value for problem in problems_of(f"{where}.{key}", value[key], rule[key])),
    )


def shown(value: object) -> str:
    """A value as it was read, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def count(value: object) -> bool:
    """A whole number from 0 up."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def flag(value: object) -> bool:
    """True or false."""
    return isinstance(value, bool)


def text(value: object) -> bool:
    """Text, not empty, that can be written."""
    return isinstance(value, str) and value != "" and value.encode(errors="replace").decode() == value


def number(value: object) -> bool:
    """Any number, also none that is finite."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def duration(value: object) -> bool:
    """Seconds, or None where they are not known."""
    return value is None or (isinstance(value, int | float) and number(value) and 0 <= value < float("inf"))


def hexadecimal(value: object) -> bool:
    """A hash of 16 digits."""
    return isinstance(value, str) and len(value) == 16 and set(value) <= set("0123456789abcdef")


def one_of(*texts: str) -> Callable[[object], bool]:
    """The rule of a text that is one of ``texts``."""
    return lambda value: isinstance(value, str) and value in texts
