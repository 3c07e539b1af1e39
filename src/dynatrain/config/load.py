"""From a TOML file and flags to a configuration, remembering where each value came from."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_origin

from pydantic import ValidationError

from dynatrain.config.errors import ConfigError
from dynatrain.config.explain import explain, is_section, keys, unknown
from dynatrain.config.run import RunConfig, Section

Tree = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A configuration and its provenance.

    Attributes:
        config: the values.
        origins: for each dotted key ``default``, ``file PATH`` or ``flag``; ``switch`` is one key.
    """

    config: RunConfig
    origins: dict[str, str]


def load_config(path: Path | None, overrides: list[str]) -> Loaded:
    """Read a configuration: defaults, then the file, then the flags.

    Args:
        path: a TOML file; None for defaults alone.
        overrides: flags as words, ``--a.b=c`` or ``--a.b`` and ``c``. A value is TOML; text needs no quotes.

    Raises:
        ConfigError: with every unknown key, every wrong value and every flag that cannot be read.
    """
    tree = _read(path) if path else {}
    origins = dict.fromkeys(keys(RunConfig), "default")
    origins |= dict.fromkeys(_leaves(tree, RunConfig), f"file {path}")
    flags, problems = _flags(overrides)
    for key, value in flags.items():
        if _set(tree, key.split("."), value):
            origins[key] = "flag"
    try:
        config = RunConfig.model_validate(_as_tuples(tree))
    except ValidationError as error:
        # A flag with an unknown key never got this far, so what is no key came from the file.
        problems += explain(error, origins, f"file {path}")
    if problems:
        raise ConfigError(f"the configuration{f' {path}' if path else ''} cannot be used", tuple(problems))
    return Loaded(config=config, origins=origins)


def _read(path: Path) -> Tree:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read", (error.strerror or str(error),)) from None
    except ValueError as error:  # of TOML, of UTF-8, or a number of too many digits
        raise ConfigError(f"{path} is not TOML", (str(error),)) from None
    except RecursionError:
        raise ConfigError(f"{path} is not TOML that can be read", ("too many brackets are open at once",)) from None


def _flags(words: list[str]) -> tuple[Tree, list[str]]:
    """Values by dotted key, and what is wrong with the words."""
    found: Tree = {}
    problems: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, mark, text = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            problems.append(f"{word!r}: a setting is --key=value or --key value")
            continue
        if not mark and rest and not rest[0].startswith("--"):
            mark, text = "=", rest.pop(0)
        field = keys(RunConfig).get(key)
        if field is None:
            problems.append(unknown(key, "flag"))
        elif not mark:
            problems.append(f"--{key}: a value is needed, as in --{key}=VALUE")
        else:
            found[key] = _parsed(text, field.annotation)
    return found, problems


def _parsed(text: str, annotation: Any) -> Any:
    """The value of a flag: as it stands where text is wanted, else TOML, else as it stands (and refused later)."""
    if annotation is str or get_origin(annotation) is Literal:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _set(tree: Tree, path: list[str], value: Any) -> bool:
    """Put ``value`` at ``path``; False where the file has something else than a table on the way."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            return False
    tree[path[-1]] = value
    return True


def _leaves(tree: Tree, section: type[Section], before: str = "") -> list[str]:
    """Dotted keys that a file sets, as far as they are known."""
    found = []
    for key, value in tree.items():
        field = section.model_fields.get(key)
        if field is not None and is_section(field.annotation) and isinstance(value, dict):
            found += _leaves(value, field.annotation, f"{before}{key}.")
        elif field is not None:
            found.append(f"{before}{key}")
    return found


def _as_tuples(value: Any) -> Any:
    """TOML's arrays as tuples, which is what a frozen value holds."""
    if isinstance(value, dict):
        return {key: _as_tuples(below) for key, below in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
