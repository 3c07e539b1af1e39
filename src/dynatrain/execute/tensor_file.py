"""A safetensors file as views of its mapped bytes, to read or to fill.

The library reads a tensor at a time and writes a file at once; here many ranks each read, or write, boxes of their own.
The format is small: eight bytes of length, a JSON header with type, shape and place of each tensor, then the data.
"""

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dynatrain.execute.shelf import Stored
from dynatrain.observe.objects import ObjectError, parse_object
from dynatrain.space.box import whole

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MAP_NORESERVE = 0x4000  # Linux's; Python's module names it in later versions only
_LENGTH = struct.Struct("<Q")
_ALIGNED = 8
"""The header is padded so that data begin at a multiple of it."""


class WeightsError(ValueError):
    """Files of weights that cannot be read or written.

    Attributes:
        problems: everything that is wrong, one sentence each.
    """

    def __init__(self, what: str, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__("\n".join((what, *(f"  - {problem}" for problem in problems))))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a file: ``start`` is its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


def open_tensors(path: Path) -> dict[str, Stored]:
    """Every tensor of a file by its name there, each as one box; nothing is read before it is used.

    What is written into the views stays in this process.

    Raises:
        WeightsError: the file cannot be opened, is cut short, has a header that is none, or a type that is unknown.
    """
    return _mapped(path, _entries(path), mmap.MAP_PRIVATE | _MAP_NORESERVE)


def open_to_fill(path: Path) -> dict[str, Stored]:
    """As :func:`open_tensors`, of a file that :func:`allocate` made: what is written into the views is in the file.

    Other processes of this machine may fill other boxes at the same time.
    """
    return _mapped(path, _entries(path), mmap.MAP_SHARED)


Looks = tuple[torch.dtype, tuple[int, ...]]
"""Element type and shape of a tensor."""


def allocate(path: Path, tensors: Mapping[str, Looks]) -> None:
    """Make a file of its full size, with all of its space taken on the disk and zeros for data.

    Args:
        path: where nothing may be yet.
        tensors: what it has, by name.

    Raises:
        OSError: the place is taken, cannot be written, or has too little space.
    """
    head, size = header(tensors)
    with path.open("xb") as file:
        file.write(head)
        file.flush()
        # A full disk shows here; under a mapping it would be a signal that ends the process.
        os.posix_fallocate(file.fileno(), 0, len(head) + size)


def header(tensors: Mapping[str, Looks], marks: Mapping[str, str] | None = None) -> tuple[bytes, int]:
    """The bytes before the data, and how many bytes of data follow.

    Args:
        tensors: what is there, by name.
        marks: what the header says beside that.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **(marks or {})}}
    end = 0
    for name in laid_out(tensors):
        dtype, shape = tensors[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return _LENGTH.pack(len(text)) + text, end


def laid_out(tensors: Mapping[str, Looks]) -> list[str]:
    """Names in the order of the data, as the library lays them: the longest element types first, then by name."""
    return sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))


def _entries(path: Path) -> dict[str, _Entry]:
    """What the header says, once the library and we have found nothing wrong with it."""
    what = f"{path} cannot be used"
    try:
        found, start, size = _read_header(path)
        ends = [entry["data_offsets"][1] for name, entry in found.items() if name != "__metadata__"]
        if (needed := start + max(ends, default=0)) > size:
            raise WeightsError(what, (f"it is cut short: its header promises {needed} bytes, it has {size}",))
        with safe_open(path, framework="pt"):
            pass  # it judges the header: known types, sizes that fit the shapes, no gaps, no overlaps
    except OSError as error:
        raise WeightsError(what, (error.strerror or str(error),)) from None
    except (SafetensorError, TypeError, LookupError, AttributeError) as error:
        raise WeightsError(what, (f"its header is not one of a safetensors file: {error}",)) from None
    unknown = [
        f"{name} is of type {entry['dtype']}; known are {', '.join(_DTYPES)}"
        for name, entry in found.items()
        if name != "__metadata__" and entry["dtype"] not in _DTYPES
    ]
    if unknown:
        raise WeightsError(what, tuple(unknown))
    return {
        name: _Entry(_DTYPES[entry["dtype"]], tuple(entry["shape"]), start + entry["data_offsets"][0])
        for name, entry in found.items()
        if name != "__metadata__"
    }


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, the first byte of the data, and the bytes of the file."""
    what = f"{path} cannot be used"
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(_LENGTH.size)
        length = _LENGTH.unpack(first)[0] if len(first) == _LENGTH.size else size
        if _LENGTH.size + length > size:
            rule = f"it is no safetensors file, or cut short inside its header: it has {size} bytes"
            raise WeightsError(what, (rule,))
        try:
            found = parse_object(file.read(length))
        except ObjectError as error:
            raise WeightsError(what, (f"its header {error}",)) from None
    return found, _LENGTH.size + length, size


def _mapped(path: Path, entries: Mapping[str, _Entry], flags: int) -> dict[str, Stored]:
    with path.open("r+b" if flags == mmap.MAP_SHARED else "rb") as file:
        pages = mmap.mmap(file.fileno(), 0, flags=flags)
    return {name: Stored(whole(entry.shape), _view(pages, entry), path) for name, entry in entries.items()}


def _view(pages: mmap.mmap, entry: _Entry) -> torch.Tensor:
    count = math.prod(entry.shape)
    if not count:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return torch.frombuffer(pages, dtype=entry.dtype, count=count, offset=entry.start).view(entry.shape)
