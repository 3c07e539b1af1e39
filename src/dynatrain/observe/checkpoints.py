"""The checkpoints of a run: one folder a step, complete or not there.

A checkpoint is written under a name that begins with a dot and renamed when everything in it, the manifest last, is on
the disk. The manifest has the size and the hash of every file, so that what was damaged later is seen, too.
"""

import json
import mmap
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import xxhash

from dynatrain.observe.atomic import sync_folder, write_atomically
from dynatrain.observe.fields import ANY, Rule, count, hexadecimal, problems_of, text
from dynatrain.observe.objects import ObjectError, read_object

SCHEMA = 1
"""Of the manifest and of what a checkpoint holds; every version ever written can be read."""

MANIFEST = "manifest.json"
WEIGHTS_ONLY = ("param",)
"""States of a checkpoint that has parameters and nothing else."""
_NAME = re.compile(r"step_([0-9]{1,18})")


def _file_name(value: object) -> bool:
    """Whether a value is the name of a file inside a folder."""
    return isinstance(value, str) and text(value) and Path(value).name == value and "\0" not in value


_RULES: Rule = {
    "schema": lambda value: count(value) and value in range(1, SCHEMA + 1),
    "run_id": lambda value: value == "" or text(value),  # a loop of somebody's own need not name its run
    "step": count,
    "layout": text,
    "world_size": lambda value: count(value) and value != 0,
    "states": [text],
    "objects": [text],
    "files": [{"name": _file_name, "size": count, "xxh3": hexadecimal}],
    "versions": {ANY: text},
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the text says what is wrong with it, all of it."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a checkpoint.

    Attributes:
        name: inside the folder.
        size: in bytes.
        xxh3: hash of its content, XXH3 with 64 bits, in hexadecimal.
    """

    name: str
    size: int
    xxh3: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """What a file is now; reads it whole."""
        return cls(path.name, path.stat().st_size, _hash(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        schema: :data:`SCHEMA` of the writer.
        run_id: of the run that wrote it.
        step: the next step: so many have been trained.
        layout: in which it was written, as text; it can be read in any.
        world_size: ranks that wrote it.
        states: what was saved of each tensor, by name of the state.
        objects: labels of registered objects.
        files: all files but the manifest.
        versions: of what wrote it.
    """

    schema: int
    run_id: str
    step: int
    layout: str
    world_size: int
    states: tuple[str, ...]
    objects: tuple[str, ...]
    files: tuple[File, ...]
    versions: dict[str, str]

    @property
    def weights_only(self) -> bool:
        """Whether nothing but parameters was saved, as by an import: whoever goes on begins with a new optimizer."""
        return self.states == WEIGHTS_ONLY

    def write(self, folder: Path) -> None:
        """Make the folder complete."""
        write_atomically(folder / MANIFEST, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a folder, every file of which is there in its size.

        Raises:
            CheckpointError: there is none, it was damaged, it is of a later version or of another step than the
                folder's name says, or files are missing or of another size.
        """
        try:
            found = read_object(folder / MANIFEST)
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: not complete, it has no {MANIFEST}") from None
        except ObjectError as error:
            raise CheckpointError(str(error)) from None
        schema = found.get("schema")
        if isinstance(schema, int) and schema > SCHEMA:
            raise CheckpointError(f"{folder}: written by a later version (schema {schema}, known is {SCHEMA})")
        if problems := problems_of("manifest", found, _RULES):
            raise CheckpointError(f"{folder}: {MANIFEST} was damaged: {'; '.join(problems)}")
        files = tuple(File(**file) for file in found.pop("files"))
        states, objects = tuple(found.pop("states")), tuple(found.pop("objects"))
        manifest = cls(files=files, states=states, objects=objects, **found)
        wrong = [problem for file in manifest.files if (problem := _misfit(folder, file))]
        if named_step(folder) not in {None, manifest.step}:
            wrong.append(f"its {MANIFEST} is of step {manifest.step}")
        if wrong:
            raise CheckpointError(f"{folder}: {'; '.join(wrong)}")
        return manifest


def checkpoint_name(step: int) -> str:
    """Name of the folder in which the state before ``step`` is kept."""
    return f"step_{step:08d}"


def partial_folder(folder: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return folder.with_name(f".{folder.name}.partial")


def complete(partial: Path, folder: Path, manifest: Manifest) -> None:
    """Give a written checkpoint its name: from now on it is there, whatever happens.

    Raises:
        OSError: the disk does not take it; under its name is then nothing.
    """
    manifest.write(partial)
    sync_folder(partial)
    if folder.exists():  # a damaged one: what can be used is not written again
        _remove(folder)
    partial.rename(folder)
    sync_folder(folder.parent)


def checkpoints(root: Path) -> tuple[Path, ...]:
    """The checkpoints under ``root``, by step; each of them was complete once."""
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name)] if root.is_dir() else []
    return tuple(sorted(found, key=step_of))


def step_of(folder: Path) -> int:
    """The step of a checkpoint, from its name."""
    found = named_step(folder)
    assert found is not None
    return found


def named_step(folder: Path) -> int | None:
    """The step in the name of a folder; None where it is not the name of a checkpoint."""
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def newest(root: Path, *, by_hash: bool = False) -> tuple[Path | None, tuple[str, ...]]:
    """The newest checkpoint that can be used, and what is wrong with those after it.

    By the sizes of their files; ``by_hash`` reads the files whole, too.
    """
    problems = []
    for folder in reversed(checkpoints(root)):
        try:
            manifest = Manifest.read(folder)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if not (wrong := damaged(folder, manifest.files) if by_hash else ()):
            return folder, tuple(problems)
        problems.append(f"{folder}: {'; '.join(wrong)}")
    return None, tuple(problems)


def set_aside(root: Path, step: int) -> None:
    """Give checkpoints after ``step`` that would pass by their sizes names that nobody goes on from; removes nothing.

    Raises:
        OSError: the disk does not take it.
    """
    for folder in checkpoints(root):
        if step_of(folder) > step and usable(folder):
            names = (f"damaged_{folder.name}{again and f'.{again}'}" for again in ("", *range(2, 1000)))
            folder.rename(next(path for name in names if not (path := folder.with_name(name)).exists()))


def prune(root: Path, keep_last: int) -> tuple[Path, ...]:
    """Remove all but the last usable checkpoints, and what unfinished saves have left; returns what was removed.

    Call it when a checkpoint was completed, and while none is being written.
    """
    whole = [folder for folder in checkpoints(root) if usable(folder)]
    old = whole[: max(0, len(whole) - keep_last)]
    for folder in (*old, *leftovers(root)):
        _remove(folder)
    return tuple(old)


def leftovers(root: Path) -> Iterator[Path]:
    """What saves have left that were never completed."""
    if root.is_dir():
        yield from (path for path in root.iterdir() if path.name.startswith(".step_"))


def damaged(folder: Path, files: Sequence[File]) -> tuple[str, ...]:
    """Of which of ``files`` the content is another than was written; reads them whole."""
    return tuple(
        f"{file.name} has hash {found}, written was {file.xxh3}"
        for file in files
        if (found := _hash(folder / file.name)) != file.xxh3
    )


def usable(folder: Path) -> bool:
    """Whether a checkpoint is there and its files have their sizes."""
    try:
        Manifest.read(folder)
    except CheckpointError:
        return False
    return True


def _misfit(folder: Path, file: File) -> str:
    path = folder / file.name
    try:
        if not path.is_file():
            return f"{file.name} is missing"
        size = path.stat().st_size
    except OSError as error:  # of a name that is too long, of a folder that is closed to us
        return f"{file.name} cannot be looked at: {error.strerror}"
    return "" if size == file.size else f"{file.name} has {size} bytes, written were {file.size}"


def _remove(folder: Path) -> None:
    """Remove a checkpoint so that it is never there in part: first its name goes."""
    gone = folder if folder.name.startswith(".") else folder.with_name(f".{folder.name}.removed")
    if gone != folder:
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return xxhash.xxh3_64_hexdigest(b"")
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            return xxhash.xxh3_64_hexdigest(pages)
