"""The TOML of a configuration. The standard library reads TOML and does not write it."""

import json
from collections.abc import Iterable

from pydantic import BaseModel

from dynatrain.config.run import RunConfig


def to_toml(config: RunConfig) -> str:
    """The TOML text of ``config``, every value written out; ``load_config`` reads an equal value back.

    A value that is left to its default by being absent (None) stays absent.
    """
    return "\n".join(_table(config, "")) + "\n"


def _table(section: BaseModel, name: str) -> Iterable[str]:
    """Plain values first, as TOML wants it, then the tables below, each under its header."""
    fields = {key: getattr(section, key) for key in type(section).model_fields}
    for key, value in fields.items():
        if value is not None and not _is_below(value):
            yield f"{key} = {_value(value)}"
    for key, value in fields.items():
        if _is_below(value):
            below = value if isinstance(value, tuple) else (value,)
            brackets = ("[[", "]]") if isinstance(value, tuple) else ("[", "]")
            for table in below:
                yield from ("", f"{brackets[0]}{name}{key}{brackets[1]}", *_table(table, f"{name}{key}."))


def _is_below(value: object) -> bool:
    return isinstance(value, BaseModel) or (isinstance(value, tuple) and any(isinstance(v, BaseModel) for v in value))


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also wants DEL escaped and takes no surrogate pairs.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
