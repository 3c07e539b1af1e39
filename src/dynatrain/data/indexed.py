r"""Megatron's tokenised corpora: ``NAME.bin`` holds tokens, ``NAME.idx`` where its sequences and documents begin.

All numbers of the ``.idx`` are little endian::

    9 bytes          b"MMIDIDX\0\0"
    u64              version, 1
    u8               code of the tokens' type (CODES)
    u64              S, sequences
    u64              D + 1, documents and one
    i32 [S]          tokens of each sequence
    i64 [S]          byte of the .bin at which each sequence begins
    i64 [D + 1]      first sequence of each document; the last entry is S
    i8 [S]           optional: a mode of each sequence, of multimodal corpora; unused here

Tokens are taken as they stand: whatever ends a document (Megatron's ``--append-eod``) is already among them.
"""

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dynatrain.data.corpus import TOKENISED, DataError, named
from dynatrain.data.readers import UnreadableError
from dynatrain.observe.paths import exists, user_path

CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""Types of tokens by their code. The two of fractions are read, and refused where token numbers are wanted."""
_MAGIC, _OLDER_MAGIC = b"MMIDIDX\0\0", b"TNTIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_MOST = 2**31 - 1
"""Largest token number, and largest number of tokens of a sequence, that the files can hold."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Indexed:
    """One pair of files. The index is read; tokens are mapped: only pages that are asked for are read.

    Attributes:
        path: the ``.bin``.
        dtype: of the tokens.
        lengths: tokens of each sequence.
        offsets: byte of the ``.bin`` at which each sequence begins.
        documents: first sequence of each document, and the number of sequences.
        content: the ``.bin``, as bytes.
    """

    path: Path
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    documents: NDArray[np.int64]
    content: NDArray[np.uint8]

    @classmethod
    def open(cls, path: Path) -> Self:
        """The corpus of which ``path`` is either file.

        Raises:
            UnreadableError: a file is cut short or not of this format; the text names it.
            OSError: a file cannot be read.
        """
        index_path, path = path.with_suffix(".idx"), path.with_suffix(".bin")
        index = index_path.read_bytes()
        dtype, sequences, entries = _header(index, index_path.name)
        sizes = (4 * sequences, 8 * sequences, 8 * entries)
        needed = _HEADER.size + sum(sizes)
        if len(index) not in (needed, needed + sequences):
            raise UnreadableError(
                f"{index_path.name} is {'cut short' if len(index) < needed else 'too long'}: it has {len(index):,} "
                f"bytes, and {sequences:,} sequences with {entries:,} document entries take {needed:,}"
            )
        starts = np.cumsum((_HEADER.size, *sizes))
        found = cls(
            path=path,
            dtype=dtype,
            lengths=np.frombuffer(index, "<i4", sequences, starts[0]),
            offsets=np.frombuffer(index, "<i8", sequences, starts[1]),
            documents=np.frombuffer(index, "<i8", entries, starts[2]),
            content=np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8),
        )
        found._refuse_impossible(index_path.name)
        return found

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.documents) - 1

    def size(self, number: int) -> int:
        """Tokens of a document (from 0)."""
        return int(self.lengths[self.documents[number] : self.documents[number + 1]].sum())

    def document(self, number: int) -> NDArray[Any]:
        """The tokens of a document (from 0), in the files' own type; its sequences one behind the other."""
        sequences = range(self.documents[number], self.documents[number + 1])
        parts = [self._sequence(sequence) for sequence in sequences]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])

    def _sequence(self, number: int) -> NDArray[Any]:
        start = int(self.offsets[number])
        return self.content[start : start + int(self.lengths[number]) * self.dtype.itemsize].view(self.dtype)

    def _refuse_impossible(self, index: str) -> None:
        """Refuse an index that no file could fit, or that this ``.bin`` does not."""
        if len(self.lengths) and min(self.lengths.min(), self.offsets.min()) < 0:
            raise UnreadableError(f"{index} has a sequence of negative length or offset: damaged")
        ends = self.offsets + self.lengths.astype(np.int64) * self.dtype.itemsize
        if len(ends) and ends.max() > len(self.content):
            raise UnreadableError(
                f"{self.path.name} is cut short: it has {len(self.content):,} bytes, and {index} says {ends.max():,}"
            )
        if (explained := int(ends.max(initial=0))) != len(self.content):
            raise UnreadableError(
                f"{self.path.name} has {len(self.content):,} bytes, and the sequences of {index} with tokens of type "
                f"{self.dtype.name} explain {explained:,}: the type is not that of the tokens, or the files are no pair"
            )
        entries = self.documents
        if len(entries) < 1 or entries[0] != 0 or entries[-1] != len(self.lengths) or (np.diff(entries) < 0).any():
            raise UnreadableError(
                f"the document entries of {index} do not ascend from 0 to its {len(self.lengths):,} sequences: damaged"
            )


def _header(index: bytes, name: str) -> tuple[np.dtype[Any], int, int]:
    """Type, sequences and document entries of an ``.idx``."""
    if index.startswith(_OLDER_MAGIC):
        raise UnreadableError(f"{name} is of the older kind TNTIDX; make it anew with Megatron's --dataset-impl mmap")
    if not index.startswith(_MAGIC):
        raise UnreadableError(f"{name} is no Megatron index: it begins with {index[:9]!r}, not with {_MAGIC!r}")
    if len(index) < _HEADER.size:
        raise UnreadableError(f"{name} is cut short: it has {len(index)} bytes, and its header takes {_HEADER.size}")
    _, version, code, sequences, entries = _HEADER.unpack_from(index)
    if version != 1:
        raise UnreadableError(f"{name} is of version {version}; 1 can be read")
    if code not in CODES:
        kinds = ", ".join(f"{code} {np.dtype(kind).name}" for code, kind in CODES.items())
        raise UnreadableError(f"{name} has tokens of type {code}; known are {kinds}")
    return np.dtype(CODES[code]), sequences, entries


def open_indexed(paths: tuple[str, ...]) -> tuple[tuple[str, Indexed], ...]:
    """The corpora at ``paths``, each once, ordered by name: that of the ``.bin`` (:func:`named`).

    Raises:
        DataError: with every path that is text, missing, cut short or of another format.
    """
    problems, found = [], []
    for text in paths:
        path = Path(os.path.abspath(user_path(text)))  # noqa: PTH100 - keeps links
        files = [path.with_suffix(suffix) for suffix in TOKENISED]
        if path.suffix not in TOKENISED:
            problems.append(f"{path}: is text or a folder, beside tokens; a corpus is all text or all .bin and .idx")
        elif missing := [file.name for file in files if not (exists(file) and file.is_file())]:
            problems.append(
                f"{path}: {' and '.join(missing)} cannot be found; tokens are a pair, NAME.bin and NAME.idx"
            )
        else:
            found.append((path.parent, files[0]))
    opened = []
    for name, path in named(found):
        try:
            opened.append((name, Indexed.open(path)))
        except (OSError, UnreadableError) as error:
            problems.append(f"{path}: {error}")
    if problems:
        raise DataError("the data cannot be read", tuple(problems))
    return tuple(opened)


def write_indexed(path: Path, documents: Iterable[Sequence[int] | NDArray[Any]], vocab_size: int) -> int:
    """Write documents as a pair of files, each document as one sequence; return the number of tokens.

    Tokens are uint16 where the vocabulary fits, else int32. The files appear under their names when they are complete,
    the ``.idx`` last.

    Args:
        path: of either file.
        documents: token numbers each, below ``vocab_size``; read once, one at a time.
        vocab_size: entries of the vocabulary.

    Raises:
        DataError: a document has something else than numbers of tokens.
        OSError: the files cannot be written.
    """
    dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<i4")
    files = [path.with_suffix(suffix) for suffix in TOKENISED]
    partial = [file.with_name(f".{file.name}.{os.getpid()}") for file in files]
    lengths: list[int] = []
    try:
        with partial[0].open("wb") as file:
            for number, document in enumerate(documents, start=1):
                tokens = np.asarray(document)
                if wrong := misfit(tokens, min(vocab_size, _MOST)):
                    raise DataError("the tokens cannot be written", (f"document {number} {wrong}",))
                file.write(tokens.astype(dtype).tobytes())
                lengths.append(len(tokens))
            os.fsync(file.fileno())
        code = next(code for code, kind in CODES.items() if np.dtype(kind) == dtype)
        counts = np.array(lengths, "<i4")
        offsets = np.cumsum([0, *lengths[:-1]], dtype="<i8")[: len(lengths)] * dtype.itemsize
        with partial[1].open("wb") as file:
            file.write(_HEADER.pack(_MAGIC, 1, code, len(lengths), len(lengths) + 1))
            for part in (counts, offsets, np.arange(len(lengths) + 1, dtype="<i8")):
                file.write(part.tobytes())
            os.fsync(file.fileno())
        for made, wanted in zip(partial, files, strict=True):
            made.replace(wanted)
    finally:
        for made in partial:
            made.unlink(missing_ok=True)
    return sum(lengths)


def misfit(tokens: NDArray[Any], vocab_size: int) -> str:
    """Why an array is no document of that vocabulary; empty where it is one."""
    if tokens.ndim != 1:
        return f"has {tokens.ndim} dimensions; a document is a list of token numbers"
    if len(tokens) and tokens.dtype.kind not in "iu":
        return f"has values of type {tokens.dtype.name}; token numbers are integers"
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        worst = tokens.min() if tokens.min() < 0 else tokens.max()
        return f"has token {worst}; the vocabulary has {vocab_size}, from 0 to {vocab_size - 1}"
    return ""
