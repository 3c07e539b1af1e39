"""A stream of tokens, kept in one file and cut into numbered samples.

Sample ``k`` is the window of tokens ``k*T .. k*T + T``: T inputs and, one further on, T targets. Neighbouring windows
share one token, so every token but the stream's first is a target exactly once (the rest after the last whole window is
left out). Every sample has exactly T targets: how many targets a batch has is known without reading it.

Documents stand one behind the other in the stream and are cut wherever a window ends. Where they begin is kept beside
the tokens: one that ends a document need not be there, and may stand inside one.
"""

import os
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from dynatrain.data.corpus import DataError
from dynatrain.data.indexed import misfit

Ids = NDArray[np.int64]


def write_tokens(path: Path, starts: Path, texts: Iterable[NDArray[np.integer]], vocab_size: int) -> int:
    """Write the tokens of all texts, one behind the other, as one ``.npy`` in the narrowest type; return their number.

    Texts are taken one at a time, so that a corpus need not fit in memory. Either file appears under its name only when
    it is complete.

    Args:
        path: of the tokens.
        starts: of another ``.npy``, int64 [texts]: which token is the first of each text.
        texts: one array of tokens each.
        vocab_size: larger than every token.

    Raises:
        DataError: a token is not below it; it would become another one.
    """
    width: np.dtype[Any] = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    number, firsts = 0, array("q")
    with _appearing(path) as file:
        _write_header(file, width, 0)
        begin = file.tell()
        for text in texts:
            if wrong := misfit(text, vocab_size):
                raise DataError("the tokens cannot be written", (f"text {len(firsts) + 1} {wrong}",))
            file.write(text.astype(width).tobytes())
            firsts.append(number)
            number += len(text)
        file.seek(0)
        _write_header(file, width, number)
        assert file.tell() == begin  # numpy leaves room for the number to grow
    with _appearing(starts) as file:
        np.save(file, np.frombuffer(firsts, dtype=np.int64))
    return number


@contextmanager
def _appearing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears under its name when all is written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _write_header(file: BinaryIO, width: np.dtype[Any], number: int) -> None:
    """The head of a ``.npy`` of one dimension."""
    described = {"descr": np.lib.format.dtype_to_descr(width), "fortran_order": False, "shape": (number,)}
    np.lib.format.write_array_header_1_0(file, described)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples:
    """Numbered samples of one stream of tokens.

    Attributes:
        tokens: the stream, unsigned integers, usually mapped from a file: only pages that are asked for are read.
        sequence: T, tokens of one sample.
        starts: which token of the stream is the first of each document, ascending; None where a sample is one document.
    """

    tokens: NDArray[np.unsignedinteger]
    sequence: int
    starts: Ids | None = None

    @classmethod
    def open(cls, path: Path, sequence: int, starts: Path | None = None) -> Self:
        """The samples of a file of :func:`write_tokens`; with the file of where texts begin, they know documents.

        Raises:
            DataError: a file is missing or no array, or the tokens are too few for one sample.
        """
        tokens = _mapped(path)
        if len(tokens) <= sequence:
            seen = (
                f"{path.name} has {len(tokens):,} tokens and a sample of sequence = {sequence} needs {sequence + 1:,}"
            )
            fit = f"sequence at most {len(tokens) - 1}" if len(tokens) > 2 else "other data"
            raise DataError("too little text", (f"{seen}; give more text, or {fit}",))
        return cls(tokens=tokens, sequence=sequence, starts=None if starts is None else _mapped(starts))

    def __len__(self) -> int:
        """Number of samples."""
        return (len(self.tokens) - 1) // self.sequence

    def sample(self, number: int) -> tuple[Ids, Ids]:
        """Inputs and targets of one sample, int64 [T] each.

        Raises:
            IndexError: there is no sample of that number.
        """
        inputs, targets = self.batch(np.array([number]))
        return inputs[0], targets[0]

    def batch(self, ids: Ids) -> tuple[Ids, Ids]:
        """Inputs and targets of the samples ``ids`` [B], int64 [B, T] each, in that order.

        Raises:
            IndexError: there is no sample of one of the numbers.
        """
        if len(ids) and (ids.min() < 0 or ids.max() >= len(self)):
            raise IndexError(f"samples {ids.min()} .. {ids.max()} of {len(self)}")
        windows = self.tokens[ids[:, None] * self.sequence + np.arange(self.sequence + 1)].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]

    def documents(self, ids: Ids) -> Ids | None:
        """Where the documents of the samples ``ids`` [B] begin; None where a sample is one document.

        Returns:
            int64 [B, T]: for every input, the number within its sample of the first token of its document; 0 for one
            that began before the sample.
        """
        if self.starts is None:
            return None
        firsts = ids[:, None] * self.sequence
        tokens = firsts + np.arange(self.sequence)
        begun = np.searchsorted(self.starts, tokens, side="right")
        starts: Ids = self.starts[begun - 1] - firsts
        return starts.clip(min=0)


def _mapped(path: Path) -> NDArray[Any]:
    """The array in a file; only pages that are asked for are read."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except (OSError, ValueError, EOFError) as error:
        raise DataError("the tokens cannot be read", (f"{path}: {error}",)) from None
