"""Writing a folder of PyTorch's distributed checkpoint (DCP) without collectives.

DCP's own save plans over a process group, which training uses meanwhile, or which is broken. Here every rank knows from
the plan what it writes, writes its file by DCP's writer, and one rank writes the metadata out of what all have told.
"""

import base64
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dynatrain.space.box import Box, shape_of


@dataclass(frozen=True, slots=True)
class Chunk:
    """One box of a tensor that a rank writes.

    Attributes:
        key: of the tensor in the checkpoint.
        shape: of the whole tensor.
        dtype: its element type.
        box: what this rank writes of it.
        data: gives the values when they are written: on the host, contiguous, in the shape of ``box``.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    data: Callable[[], torch.Tensor]


def write_chunks(folder: Path, rank: int, chunks: Sequence[Chunk], objects: Mapping[str, Any]) -> str:
    """Write one rank's file, and bring it to the disk.

    Args:
        folder: of the checkpoint; there already.
        rank: names the file.
        chunks: tensors; written in this order.
        objects: what is no tensor, by key.

    Returns:
        What :func:`write_metadata` needs of it, as text.

    Raises:
        OSError: the disk does not take it.
    """
    by_key = {(chunk.key, tuple(start for start, _ in chunk.box)): chunk for chunk in chunks}
    items = [_item(chunk) for chunk in chunks]
    items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in objects]
    writer = FileSystemWriter(folder, sync_files=True)
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [SavePlan(items)])[rank]
    try:
        results = writer.write_data(plan, _Planner(by_key, objects)).wait()
    except RuntimeError as error:  # of torch's zip writer, which keeps the cause to itself
        raise OSError(f"{folder} cannot be written: {str(error).splitlines()[0]}") from error
    entries = [(chunk.key, chunk.shape, chunk.dtype, chunk.box) for chunk in chunks]
    return base64.b64encode(pickle.dumps((entries, list(objects), results))).decode()


def write_metadata(folder: Path, told: Sequence[str], paths: Mapping[str, tuple[str | int, ...]]) -> None:
    """Write what makes the files a DCP checkpoint.

    Args:
        folder: of the checkpoint.
        told: what :func:`write_chunks` returned, of all ranks.
        paths: where each key stands in the nested state dict that it is a part of.
    """
    parts = [pickle.loads(base64.b64decode(text)) for text in told]  # noqa: S301 - of our own ranks, a moment ago
    found: dict[str, Any] = {}
    for entries, objects, _ in parts:
        found |= {key: BytesStorageMetadata() for key in objects}
        for key, shape, dtype, box in entries:
            entry = found.setdefault(
                key, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks=[])
            )
            entry.chunks.append(_chunk(box))
    metadata = Metadata(state_dict_metadata=found, planner_data={key: paths[key] for key in found})
    FileSystemWriter(folder, sync_files=True).finish(metadata, [results for _, _, results in parts])


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([start for start, _ in box]), torch.Size(shape_of(box)))


def _item(chunk: Chunk) -> WriteItem:
    data = TensorWriteData(
        chunk=_chunk(chunk.box), properties=TensorProperties(dtype=chunk.dtype), size=torch.Size(chunk.shape)
    )
    index = MetadataIndex(chunk.key, torch.Size([start for start, _ in chunk.box]))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


class _Planner(SavePlanner):
    """Gives DCP's writer the data of its items, when it asks for them."""

    def __init__(self, chunks: Mapping[tuple[str, tuple[int, ...]], Chunk], objects: Mapping[str, Any]) -> None:
        self._chunks = chunks
        self._objects = objects

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key, offset = write_item.index.fqn, write_item.index.offset
        if write_item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save(self._objects[key], buffer)
            return buffer
        return self._chunks[key, tuple(offset or ())].data()

    # DCP plans over a process group with these; the plan was made by us.

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> SavePlan:
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        raise NotImplementedError
