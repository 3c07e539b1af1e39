"""A stream of tokens, kept in one file and cut into numbered samples.

Sample ``k`` is the window of tokens ``k*T .. k*T + T``: T inputs and, one further on, T targets. Neighbouring windows
share one token, so every token but the stream's first is a target exactly once (the rest after the last whole window is
left out). Every sample has exactly T targets: how many targets a batch has is known without reading it.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from dynatrain.data.corpus import DataError

Ids = NDArray[np.int64]


def write_tokens(path: Path, texts: Iterable[NDArray[np.integer]], vocab_size: int) -> int:
    """Write the tokens of all texts, one behind the other, as one ``.npy`` in the narrowest type; return their number.

    Texts are taken one at a time, so that a corpus need not fit in memory. The file appears under its name only when
    it is complete.
    """
    width: np.dtype[Any] = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    number = 0
    try:
        with partial.open("wb") as file:
            _write_header(file, width, 0)
            begin = file.tell()
            for text in texts:
                file.write(text.astype(width).tobytes())
                number += len(text)
            file.seek(0)
            _write_header(file, width, number)
            assert file.tell() == begin  # numpy leaves room for the number to grow
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return number


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
    """

    tokens: NDArray[np.unsignedinteger]
    sequence: int

    @classmethod
    def open(cls, path: Path, sequence: int) -> Self:
        """The samples of a file of :func:`write_tokens`.

        Raises:
            DataError: the file is missing or no array of tokens, or too short for one sample.
        """
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError("the tokens cannot be read", (f"{path}: {error}",)) from None
        if len(tokens) <= sequence:
            seen = (
                f"{path.name} has {len(tokens):,} tokens and a sample of sequence = {sequence} needs {sequence + 1:,}"
            )
            fit = f"sequence at most {len(tokens) - 1}" if len(tokens) > 2 else "other data"
            raise DataError("too little text", (f"{seen}; give more text, or {fit}",))
        return cls(tokens=tokens, sequence=sequence)

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
