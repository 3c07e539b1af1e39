"""Folders that are there whole or not at all, whatever is killed when, and whoever else makes one of that name."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MARK = ".dynatrain"
"""How the names of drafts end: what bears it beside a folder's name was made here and nowhere else."""


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the name ``path`` when the body ends well; at most an empty one may be there.

    Until then it lies beside ``path`` under a hidden name, and its maker holds a lock on it. What makers have left that
    were killed is removed by the next.

    Raises:
        BlockingIOError: another process is making the folder at ``path``.
        OSError: the place cannot be written, or was taken meanwhile.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in _drafts_of(path):
        with _locked(old):
            shutil.rmtree(old, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=_MARK, dir=path.parent))
    with _locked(draft):
        try:
            draft.chmod(0o755)
            yield draft
            draft.rename(path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise


def discard(path: Path) -> None:
    """Remove a folder so that it is never there in part: first its name goes."""
    gone = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=_MARK, dir=path.parent))
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _drafts_of(path: Path) -> list[Path]:
    """Drafts of the folder at ``path`` that were not finished."""
    before = f".{path.name}."
    found = [one for one in path.parent.iterdir() if one.name.startswith(before) and one.name.endswith(_MARK)]
    # Between both are mkdtemp's letters: of another folder, whose name begins as this one's, there would be a dot.
    return [one for one in found if "." not in one.name[len(before) : -len(_MARK)]]


@contextmanager
def _locked(draft: Path) -> Iterator[None]:
    """Hold the lock on a draft, which ends with this process at the latest.

    Raises:
        BlockingIOError: another process holds it.
    """
    handle = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
