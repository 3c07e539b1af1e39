"""Documents: named texts, read in one agreed order, and their split into training and validation.

The default corpus is the Python standard library's own sources on the user's machine: real text, no download. Otherwise
it is any mix of files of the kinds of :mod:`dynatrain.data.readers` and of folders of them. A document is named by its
path below the one that was given, so that its name, and with it its side of the split, does not depend on where the
corpus lies or on what else is in it.
"""

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dynatrain.data.readers import SUFFIXES, UnreadableError, texts_in
from dynatrain.observe.paths import exists, user_path

TOKENISED = (".bin", ".idx")
"""The two files of a corpus that is tokenised already."""
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
"""Tests hold deliberately broken text; installed packages are not the standard library."""
_SHOWN = 10


class DataError(ValueError):
    """Data that cannot be trained on.

    Attributes:
        problems: everything that is wrong: what was seen where, and what is accepted.
    """

    def __init__(self, what: str, problems: tuple[str, ...]) -> None:
        self.problems = problems
        rest = len(problems) - _SHOWN
        shown = (*problems[:_SHOWN], *([f"... and {rest} more"] if rest > 0 else ()))
        super().__init__("\n".join((what, *(f"  - {problem}" for problem in shown))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text.

    Attributes:
        name: path with forward slashes (:func:`named`); texts of a file that holds many have ``#`` and their number
            (``.tar``: their key) behind it.
        text: not empty.
    """

    name: str
    text: str


def already_tokenised(paths: tuple[str, ...]) -> bool:
    """Whether a corpus is tokens (:mod:`dynatrain.data.indexed`) and not text; looks at names alone."""
    return any(Path(path).suffix in TOKENISED for path in paths)


def read_documents(paths: tuple[str, ...], column: str = "text") -> tuple[Document, ...]:
    """All documents of a corpus, ordered by name of file (then as they stand in it). Empty ones are left out.

    Args:
        paths: files and folders; empty for the Python standard library's sources. Folders are read to the bottom,
            hidden folders and links to folders left out.
        column: name under which rows and records have their text.

    Raises:
        DataError: a path that is missing, of another kind, or not readable as text; no document at all.
    """
    problems: list[str] = []
    documents: list[Document] = []
    for name, file in _files(paths, problems):
        try:
            found = texts_in(file, column)
            documents += (Document(name=name + place, text=text) for place, text in found if text.strip())
        except (OSError, UnicodeDecodeError, SyntaxError, UnreadableError) as error:
            problems.append(f"{file}: {_reason(error)}")
    if not documents and not problems:
        where = ", ".join(paths) or sysconfig.get_path("stdlib")
        problems.append(f"{where}: no text in any file that ends in {', '.join(SUFFIXES)}; give others as paths")
    if problems:
        raise DataError("the data cannot be read", tuple(problems))
    return tuple(documents)


def split(
    documents: tuple[Document, ...], *, seed: int, validation: float
) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Training and validation documents, both in the given order.

    A document's side is a function of (seed, its name): adding or removing others does not move it. Only where
    a side would stay empty does the document with the nearest hash go there.

    Args:
        documents: of the whole corpus.
        seed: of the run.
        validation: share of documents held out, in [0, 1); 0 holds out none.

    Raises:
        DataError: one document, which cannot be on both sides.
    """
    out = held_out((document.name for document in documents), seed=seed, validation=validation)
    train = tuple(document for document, away in zip(documents, out, strict=True) if not away)
    return train, tuple(document for document, away in zip(documents, out, strict=True) if away)


def held_out(names: Iterable[str], *, seed: int, validation: float) -> list[bool]:
    """Which of the documents of these names :func:`split` holds out."""
    names = list(names)
    if not validation:
        return [False] * len(names)
    if len(names) < 2:
        seen = f"the corpus is one document ({names[0]}) and validation is {validation}"
        raise DataError(
            "the data cannot be split", (f"{seen}; give two documents or more, or hold out none with validation = 0",)
        )
    hashes = [_hash(seed, name) for name in names]
    ordered = sorted(hashes)
    threshold = min(max(int(validation * 2**64), ordered[0] + 1), ordered[-1])
    return [value < threshold for value in hashes]


def _hash(seed: int, name: str) -> int:
    """Evenly spread over 64 bits."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def _files(paths: tuple[str, ...], problems: list[str]) -> list[tuple[str, Path]]:
    """``(name, file)`` of every file of the corpus, by name; paths that lead nowhere are added to ``problems``."""
    if not paths:
        root = Path(sysconfig.get_path("stdlib"))
        return named((root, file) for file in _walk(root, (".py",), _STDLIB_SKIPPED, problems))
    found: list[tuple[Path, Path]] = []
    for path in (Path(os.path.abspath(user_path(text))) for text in paths):  # noqa: PTH100 - keeps links
        if not exists(path):
            problems.append(f"{path}: does not exist; accepted are files ({', '.join(SUFFIXES)}) and folders of them")
        elif path.is_dir():
            inside = list(_walk(path, SUFFIXES, set(), problems))
            found += [(path, file) for file in inside]
            problems += (f"{file}: {why}" for file, why in _left_out(path))
            if not inside:
                problems.append(f"{path}: a folder without a file that ends in {', '.join(SUFFIXES)}")
        elif path.suffix.lower() not in SUFFIXES:
            problems.append(f"{path}: ends in {path.suffix or 'nothing'!r}; accepted are {', '.join(SUFFIXES)}")
        else:
            found.append((path.parent, path))
    return named(found)


def named(files: Iterable[tuple[Path, Path]]) -> list[tuple[str, Path]]:
    """``(name, file)``, each file once, by name: its path below the given folder in which it was found first.

    A name that another file has already gets a number behind it (``x.txt@2``), so what is given later renames nothing.

    Args:
        files: ``(folder, file in it)``, both absolute, in the order in which they were given.
    """
    names: dict[Path, str] = {}
    taken: Counter[str] = Counter()
    for folder, file in files:
        if file not in names:
            name = file.relative_to(folder).as_posix()
            taken[name] += 1
            names[file] = name if taken[name] == 1 else f"{name}@{taken[name]}"
    return sorted((name, file) for file, name in names.items())


def _walk(root: Path, suffixes: tuple[str, ...], skipped: set[str], problems: list[str]) -> Iterator[Path]:
    """Files below ``root`` with one of the suffixes, in an order that does not depend on the file system."""

    def unreadable(error: OSError) -> None:
        problems.append(f"{error.filename}: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=unreadable):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        yield from (Path(folder) / name for name in sorted(files) if name.lower().endswith(suffixes))


def _left_out(root: Path) -> Iterator[tuple[Path, str]]:
    """Files below ``root`` that are meant as data, and would be passed over."""
    for file in _walk(root, (".idx", *_PACKED), set(), []):
        if file.suffix == ".idx" and file.with_suffix(".bin").exists():
            yield file, "tokens in a folder of texts; give .bin and .idx by their own names, without texts beside"
        elif file.suffix.lower() in _PACKED and file.stem.lower().endswith(SUFFIXES):
            yield file, f"is packed; unpack it, or move it out of the folder: {file.suffix} is not read"


def _reason(error: Exception) -> str:
    """Why a file cannot be read, in one line."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8 ({error.reason}); files are read as UTF-8"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)
