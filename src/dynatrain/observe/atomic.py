"""Files that are there whole or not at all, whatever is killed when."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Put ``text`` at ``path``, in the place of what was there; readers see the old text or the new, never a part.

    Raises:
        OSError: the folder cannot be written; nothing has changed.
    """
    with _draft(path, text) as draft:
        draft.replace(path)
    sync_folder(path.parent)


def create_atomically(path: Path, text: str) -> None:
    """Put ``text`` at ``path``, where nothing may be yet.

    Raises:
        FileExistsError: something is there; it is left as it was.
        OSError: the folder cannot be written; nothing has changed.
    """
    with _draft(path, text) as draft:
        os.link(draft, path)
    sync_folder(path.parent)


@contextmanager
def passing_parents(path: Path) -> Iterator[None]:
    """Where the body raises, take those empty folders above ``path`` away again that were not there before."""
    absent = [folder for folder in path.absolute().parents if not os.path.lexists(folder)]
    try:
        yield
    except BaseException:
        for folder in absent:
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def _draft(path: Path, text: str) -> Iterator[Path]:
    """The text under a name of this process's own, on the disk; the name is gone afterwards, whatever happens."""
    draft = path.parent / f".{path.name}.{os.getpid()}.draft"
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder as lasting as the files."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
