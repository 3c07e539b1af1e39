"""Initial values as a function of (seed, canonical name, global index).

Any rank generates exactly the box that it owns, alone, and gets the bits that a single device would have there. Element
``i`` of the flattened tensor is word ``i % 4`` of block ``i // 4`` of a Philox stream keyed by (seed, name). A word is
turned into a normal-like number (mean 0, given std, cut at 3.46 std) by adding its four 16-bit quarters as integers
and one multiplication: no library function takes part whose last bit differs between processors.
"""

import hashlib
import math
from collections.abc import Iterator
from itertools import product
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dynatrain.space.blocks import BIAS, COUNTERS
from dynatrain.space.box import Box, shape_of, volume
from dynatrain.space.decoder import DecoderShape

Rule = float | Literal["ones", "zeros"]
"""A standard deviation, or one value for all."""

_QUARTERS_MEAN = 2 * 0xFFFF
_QUARTERS_STD = math.sqrt((2**32 - 1) / 3)
_BLOCK = 1 << 16
"""Elements generated at once: bounds the temporary memory."""


def initial_rule(name: str, shape: DecoderShape) -> Rule:
    """How the parameter ``name`` (canonical) starts.

    Norm weights are one, biases and counters zero. Projections that write to the residual stream get a std that falls
    with depth, so that the stream's variance at the end does not grow with the number of layers.
    """
    if name.endswith("norm.weight"):
        return "ones"
    if name.endswith((".bias", BIAS, COUNTERS)):
        return "zeros"
    if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
        return 0.02 / math.sqrt(2 * shape.num_hidden_layers)
    return 0.02


def initial_box(seed: int, name: str, shape: tuple[int, ...], box: Box, *, rule: Rule, dtype: torch.dtype) -> Tensor:
    """The initial values of ``box`` of the tensor ``name``, bit-equal to that slice of the whole tensor.

    Args:
        seed: of the run.
        name: canonical name.
        shape: global shape of the tensor.
        box: any box within ``shape``; may be empty.
        rule: std, ``"ones"`` or ``"zeros"``.
        dtype: of the result. Values are rounded to fp32 first, so that fp64 and fp32 runs start from the same numbers.

    Returns:
        A new contiguous CPU tensor of the box's shape.
    """
    if isinstance(rule, str):
        return torch.full(shape_of(box), 1 if rule == "ones" else 0, dtype=dtype)
    flat = np.empty(volume(box), dtype=np.float32)
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "little")
    place = 0
    for start, count in _runs(shape, box):
        for offset in range(0, count, _BLOCK):
            size = min(_BLOCK, count - offset)
            flat[place : place + size] = _normal(key, start + offset, size) * (rule / _QUARTERS_STD)
            place += size
    return torch.from_numpy(flat).view(shape_of(box)).to(dtype)


def _runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """``(first flat index, count)`` of each stretch of ``box`` that is contiguous in the whole tensor, in order."""
    if not volume(box):
        return
    inner = len(shape)
    while inner > 0 and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = max(inner - 1, 0)  # the innermost dim that is not whole: a stretch covers its range
    count = volume(box[cut:])
    first = box[cut][0] * strides[cut] if box else 0
    for index in product(*(range(*span) for span in box[:cut])):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), count


def _normal(key: int, start: int, count: int) -> np.ndarray:
    """Elements ``start`` .. ``start + count`` of a stream, as fp64 integers of mean 0 and std ``_QUARTERS_STD``."""
    block, skip = divmod(start, 4)
    words = np.random.Philox(key=key, counter=block).random_raw(count + skip)[skip:]
    total = (words & 0xFFFF) + (words >> 16 & 0xFFFF) + (words >> 32 & 0xFFFF) + (words >> 48)
    return total.astype(np.float64) - _QUARTERS_MEAN
