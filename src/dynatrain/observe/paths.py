"""Paths as users write them: what cannot be one leads nowhere, and is told as that."""

from pathlib import Path


def user_path(text: str) -> Path:
    """The path that a user means; the ``~name`` of a user whom the system does not know is a name like any other."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def exists(path: Path) -> bool:
    """Whether something is there; nothing is where the system will not look: a name too long, a folder closed to us."""
    try:
        return path.exists()
    except OSError:
        return False
