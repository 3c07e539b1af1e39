"""JSON objects that others wrote, read in one way: whatever may be wrong with a text is one kind of error."""

import json
from pathlib import Path
from typing import Any


class ObjectError(ValueError):
    """What was read is no JSON object; the text says what it is instead."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: there is no file.
        ObjectError: it holds something else, or cannot be read.
    """
    try:
        written = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ObjectError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        return parse_object(written)
    except ObjectError as error:
        raise ObjectError(f"{path} {error}") from None


def parse_object(written: str | bytes) -> dict[str, Any]:
    """The JSON object that a text is.

    Raises:
        ObjectError: it is none; begins with a verb, to go behind the name of what was read.
    """
    try:
        found = json.loads(written.decode() if isinstance(written, bytes) else written)
    except RecursionError:
        raise ObjectError("is not JSON that can be read: too many brackets are open at once") from None
    except ValueError as error:  # of JSON, of UTF-8, or a number of too many digits
        raise ObjectError(f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ObjectError(f"holds a {type(found).__name__}, not a JSON object")
    return found
