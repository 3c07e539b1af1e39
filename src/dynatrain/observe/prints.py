"""Fingerprints of what must be alike for all processes of a run: short, and for people to compare by eye."""

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

import dynatrain


def print_of(parts: Iterable[bytes]) -> str:
    """Twelve hexadecimal digits that are others for other parts, also where they are cut elsewhere."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:12]


@functools.cache
def code_print() -> str:
    """Of the source of dynatrain that this process runs."""
    root = Path(dynatrain.__file__).parent
    files = sorted(root.rglob("*.py"))
    return print_of(part for file in files for part in (file.relative_to(root).as_posix().encode(), file.read_bytes()))
