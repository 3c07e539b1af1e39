"""What an engine's rank gets in one piece: boxes of its own tensors, as the bytes of a safetensors file.

An engine reads it with what it has: the library, or ten lines. Tensor ``n`` is the ``n``-th of ``boxes`` in the
header's marks, ``[name, [[start, stop], ...]]``, in the shape of its box; or, of one that changed in few places since
the version before, ``n.indices`` and ``n.values``: int32 places in row-major order, and what is there now. What has not
changed at all is not in it. ``crc32`` is of all bytes behind the header.
"""

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dynatrain.execute.tensor_file import header, laid_out
from dynatrain.plan.publish import INDEX_BYTES
from dynatrain.space.box import Box

_BLOCK = 1 << 16
"""Elements that are compared at once."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Content:
    """One box of a message.

    Attributes:
        tensor: the engine's name.
        box: in the tensor of the rank that it is for.
        value: contiguous, on the host.
        before: the same of the version that the engine has; None where all is sent.
    """

    tensor: str
    box: Box
    value: torch.Tensor
    before: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """The bytes of a message.

    Attributes:
        stretches: of memory, in their order.
        made: bytes of them that were made for it; values that are sent whole are not copied.
    """

    stretches: list[memoryview]
    made: int


def message(contents: Iterable[Content], version: int, base: int | None) -> Message:
    """Make a message.

    Args:
        contents: its boxes.
        version: of the weights.
        base: the version that changes are changes of; None where all is sent.
    """
    boxes, tensors = [], {}
    for one in contents:
        parts = {"": one.value} if one.before is None else _changes(one.value, one.before)
        if parts:
            tensors |= {f"{len(boxes)}{kind}": part for kind, part in parts.items()}
            boxes.append([one.tensor, one.box])
    looks = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    data = [_bytes(tensors[name]) for name in laid_out(looks)]
    check = 0
    for stretch in data:
        check = zlib.crc32(stretch, check)
    marks = {"boxes": json.dumps(boxes, separators=(",", ":")), "crc32": str(check), "weight_version": str(version)}
    if base is not None:
        marks["base_version"] = str(base)
    head, _ = header(looks, marks)
    made = sum(tensor.nbytes for name, tensor in tensors.items() if not name.isdecimal())
    return Message([memoryview(head), *data], made)


def _changes(value: torch.Tensor, before: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a box is sent as where the engine has the version before; bits count, not numbers."""
    bits = _BITS[value.itemsize]
    one, other = value.view(bits).reshape(-1), before.view(bits).reshape(-1)
    starts = range(0, len(one), _BLOCK)
    count = sum(int((one[at : at + _BLOCK] != other[at : at + _BLOCK]).sum()) for at in starts)
    if not count:
        return {}
    if count * (INDEX_BYTES + value.itemsize) >= value.nbytes or len(one) > torch.iinfo(torch.int32).max:
        return {"": value}
    # Block by block: the places of all at once, in 64 bits, would be longer than what is sent.
    indices, end = torch.empty(count, dtype=torch.int32), 0
    for at in starts:
        found = (one[at : at + _BLOCK] != other[at : at + _BLOCK]).nonzero().squeeze(1)
        indices[end : end + len(found)] = found + at
        end += len(found)
    return {".indices": indices, ".values": value.reshape(-1)[indices]}


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
