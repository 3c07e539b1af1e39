"""What is wrong with a configuration, in words that name the key, the value, its origin, the rule and what is near."""

import difflib
from collections.abc import Mapping
from typing import TypeGuard

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dynatrain.config.run import RunConfig, Section, Switch
from dynatrain.observe.fields import shown

_RULES = {
    "tuple_type": 'a list, as in ["a", "b"]',
    "model_type": "a table, with its keys below its header",
}


def is_section(annotation: object) -> TypeGuard[type[Section]]:
    """Whether a field holds a table."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def keys(section: type[Section], before: str = "") -> dict[str, FieldInfo]:
    """Every key that can be set, dotted, with its field; a list of tables is one key."""
    found: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        if is_section(field.annotation):
            found |= keys(field.annotation, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = field
    return found


def unknown(key: str, origin: str) -> str:
    """The refusal of a key that does not exist, with the nearest that do."""
    below = [name for name in keys(RunConfig) if name.startswith(f"{key}.")]
    if below:
        return f"{key} ({origin}) is a section; its keys are {', '.join(below)}"
    place, _, name = key.rpartition(".")
    if place.startswith("switch") and origin == "flag":
        return (
            f"{key} (flag) is not a key: all scheduled switches are one value, --switch='[{{step=3, layout=\"tp2\"}}]'"
        )
    legal = [*{**keys(RunConfig), **RunConfig.model_fields}]
    if place.startswith("switch"):
        legal = [f"{place}.{field}" for field in Switch.model_fields]
    same_name = [other for other in legal if other.rpartition(".")[2] == name]
    near = ", ".join(same_name or difflib.get_close_matches(key, legal, n=2))
    return f"{key} ({origin}) is not a key" + (f"; nearest: {near}" if near else "")


def explain(error: ValidationError, origins: Mapping[str, str], elsewhere: str) -> list[str]:
    """One sentence for each thing that pydantic found wrong; ``elsewhere`` is the origin of what is no key."""
    return [_sentence(details, origins, elsewhere) for details in error.errors(include_url=False)]


def _sentence(details: ErrorDetails, origins: Mapping[str, str], elsewhere: str) -> str:
    dotted = ".".join(str(part) for part in details["loc"])
    origin = next((origin for key, origin in origins.items() if f"{dotted}.".startswith(f"{key}.")), elsewhere)
    if details["type"] == "extra_forbidden":
        return unknown(dotted, origin)
    if details["type"] == "missing":
        return f"{dotted} ({origin}) is missing"
    rule = _RULES.get(details["type"]) or details["msg"].removeprefix("Input should be ")
    value = details["input"]
    expected = str(details.get("ctx", {}).get("expected", ""))
    near = difflib.get_close_matches(str(value), expected.replace("'", "").replace(" or ", ", ").split(", "), n=1)
    return f"{dotted} = {shown(value)} ({origin}): should be {rule}{f'; nearest: {near[0]}' if near else ''}"
