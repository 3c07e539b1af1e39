"""A folder of PyTorch's distributed checkpoint (DCP) as a shelf, whoever wrote it.

DCP's own load reads whole chunks and copies out of them. Here a chunk is a view of its mapped file: a rank reads the
bytes of its boxes and no others. DCP keeps each chunk as what ``torch.save`` makes, a zip archive whose data are stored
as they are; so a chunk's shape and strides are read from its pickle, and its data lie at a known place of the file.
"""

import io
import math
import mmap
import pickle
import struct
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dynatrain.execute.shelf import Stored
from dynatrain.space.box import Box

METADATA = ".metadata"
_LOCAL_HEADER = 30
"""Bytes of a zip member's local header before its name; the lengths of name and extra field are its last four."""
_ENTRY = struct.Struct("<10xH8xI4xHHH8xI")
"""An entry of the directory: how it is packed, size, lengths of name, extra field and comment, the header's place."""
_END = struct.Struct("<4s6xH4xI2x")
"""The end of an archive: mark, entries of the directory, its place, or that it stands in the 64-bit form."""
_END64 = struct.Struct("<4s28xQ8xQ")
_IN_END64 = 0xFFFFFFFF
_LOCATOR = 20
"""Bytes between the two ends."""


class FolderError(ValueError):
    """A folder that cannot be used as a checkpoint.

    Attributes:
        problems: everything that is wrong, one sentence each.
    """

    def __init__(self, what: str, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__("\n".join((what, *(f"  - {problem}" for problem in problems))))


class DcpFolder:
    """What a DCP folder holds, by the keys that its writer gave.

    Args:
        path: the folder.

    Raises:
        FolderError: it is no DCP folder, or a file that it names is missing or too short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, memoryview] = {}
        try:
            self._metadata = _metadata_of(path / METADATA)
        except FileNotFoundError:
            raise FolderError(f"{path} is no checkpoint", (f"it has no {METADATA}",)) from None
        except Exception as error:
            raise FolderError(f"{path} cannot be used", (f"{METADATA} cannot be read: {error}",)) from error
        if problems := tuple(self._short_files()):
            raise FolderError(f"{path} is damaged", problems)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shape of every tensor."""
        found = self._metadata.state_dict_metadata.items()
        return {key: tuple(entry.size) for key, entry in found if isinstance(entry, TensorStorageMetadata)}

    @cached_property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Element type of every tensor."""
        found = self._metadata.state_dict_metadata.items()
        return {key: entry.properties.dtype for key, entry in found if isinstance(entry, TensorStorageMetadata)}

    @cached_property
    def objects(self) -> tuple[str, ...]:
        """Keys of what is no tensor."""
        return tuple(key for key in self._metadata.state_dict_metadata if key not in self.shapes)

    @property
    def places(self) -> Mapping[str, tuple[str | int, ...]]:
        """Where each key stands in the nested state dict that was saved; else the key itself."""
        said = self._metadata.planner_data or {}
        return {key: tuple(said.get(key, (key,))) for key in self._metadata.state_dict_metadata}

    def stored(self, key: str) -> tuple[Stored, ...]:
        """The boxes of a tensor; their views are made when they are asked for."""
        found = []
        for chunk in self._metadata.state_dict_metadata[key].chunks:
            where = self._metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            if where.transform_descriptors:
                raise FolderError(f"{self.path} cannot be used", (f"{key} is stored {where.transform_descriptors}",))
            box: Box = tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            view = partial(self._view, key, box, where.relative_path, where.offset, where.length)
            found.append(Stored(box, view, self.path / where.relative_path))
        return tuple(found)

    def read(self, key: str) -> Any:
        """An object, made of plain containers, numbers, texts and tensors."""
        where = self._metadata.storage_data[MetadataIndex(key)]
        data = self._file(where.relative_path)[where.offset : where.offset + where.length]
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")

    def _view(self, key: str, box: Box, name: str, offset: int, length: int) -> torch.Tensor:
        file = self._file(name)
        shape = tuple(stop - start for start, stop in box)
        try:
            view = _view_of(file[offset : offset + length])
        except (pickle.UnpicklingError, struct.error, KeyError, EOFError, ValueError) as error:
            problem = f"{key} at byte {offset} of {name} is no tensor that torch.save wrote: {error}"
            raise FolderError(f"{self.path} is damaged", (problem,)) from error
        if tuple(view.shape) != shape:
            problem = f"{key} at byte {offset} of {name} has shape {tuple(view.shape)}, {METADATA} says {shape}"
            raise FolderError(f"{self.path} is damaged", (problem,))
        return view

    def _file(self, name: str) -> memoryview:
        if name not in self._files:
            with (self.path / name).open("rb") as file:
                # Private, so that views may pass for writable; nothing is written.
                pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self._files[name] = memoryview(pages)
        return self._files[name]

    def _short_files(self) -> Iterator[str]:
        needed: dict[str, int] = {}
        for where in self._metadata.storage_data.values():
            needed[where.relative_path] = max(needed.get(where.relative_path, 0), where.offset + where.length)
        for name, size in sorted(needed.items()):
            file = self.path / name
            if not file.is_file():
                yield f"{name} is missing"
            elif file.stat().st_size < size:
                yield f"{name} has {file.stat().st_size} bytes of {size}"


_PLAIN = {
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}
"""What a ``.metadata`` is made of, by module: values, and nothing that acts."""


class _Metadata(pickle.Unpickler):
    """Reads a ``.metadata``, which is a pickle, as if it were none: from a stranger's it runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint's metadata")


def _metadata_of(path: Path) -> Metadata:
    with path.open("rb") as file:
        found = _Metadata(file).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
    return found


def _view_of(archive: memoryview) -> torch.Tensor:
    """The one tensor of what ``torch.save`` wrote, as a view of its bytes."""
    members = dict(_members(archive))
    described, data = members["data.pkl"], members["data/0"]
    if described.packed or data.packed:
        raise ValueError("it is compressed")
    start = _start(archive, described)
    dtype, offset, shape, strides = _Described(io.BytesIO(archive[start : start + described.size])).load()
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    count = 1 + offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    flat = torch.frombuffer(archive, dtype=dtype, count=count, offset=_start(archive, data))
    return flat.as_strided(shape, strides, offset)


class _Member(NamedTuple):
    """One file of a zip archive: how it is packed (0: not at all), its size if it is not, and its header's place."""

    packed: int
    size: int
    header: int


def _members(archive: memoryview) -> Iterator[tuple[str, _Member]]:
    """What a zip archive's directory has, by name inside the one folder that ``torch.save`` makes.

    A checkpoint has thousands of archives with a few members each: ``zipfile`` would take most of the time of a load.
    """
    mark, count, at = _END.unpack(archive[-_END.size :])
    if mark == b"PK\5\6" and at == _IN_END64:
        mark, count, at = _END64.unpack(archive[-_END64.size - _LOCATOR - _END.size : -_LOCATOR - _END.size])
    if mark not in (b"PK\5\6", b"PK\6\6"):
        raise ValueError("it has no end of a zip archive")
    for _ in range(count):
        packed, size, *lengths, header = _ENTRY.unpack(archive[at : at + _ENTRY.size])
        at += _ENTRY.size
        name = str(archive[at : at + lengths[0]], "utf-8")
        yield name.partition("/")[2], _Member(packed, size, header)
        at += sum(lengths)


def _start(archive: memoryview, member: _Member) -> int:
    """Where a member's data begin."""
    end = member.header + _LOCAL_HEADER
    name, extra = struct.unpack("<HH", archive[end - 4 : end])
    return end + int(name) + int(extra)


_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
"""What torch calls storages in pickles; its own classes warn when they are asked."""


class _Described(pickle.Unpickler):
    """Reads of a pickled tensor what it looks like: ``(dtype, offset, shape, strides)``; runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda dtype, offset, shape, strides, *_: (dtype, offset, shape, strides)
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a plain tensor")

    def persistent_load(self, pid: Any) -> torch.dtype:
        dtype: torch.dtype = pid[1]
        return dtype
