"""Digests of tensors that are equal under every cut.

The digest of a tensor is the sum, mod 2^64, over all elements of ``(bits + 1) * weight``: ``bits`` is the element's
bit pattern as a signed integer (unsigned for uint8 and bool), ``weight`` the product over the dims of
``multiplier(dim) ** index``. A sum can be taken piece by piece in any cut; weights depend on the place, so order
counts; the ``+ 1`` makes an element that nobody holds, or two hold, visible even where it is zero. Weights are odd,
hence one changed element always changes the digest.

Elements of 8 or 16 bytes are words of 4 bytes side by side along the last dim: weights of places that lie a large power
of two apart differ only in their high bits, and so do round numbers in fp64; together they could cancel.

``docs/digest.py`` computes the same in fifteen lines of numpy.
"""

import math
from functools import lru_cache, reduce

import torch

from dynatrain.space.box import Box, intersect, tiles, within

MODULUS = 1 << 64
_COLUMNS = 8192
"""Longest stretch along the last dims that is weighted at once."""
_BLOCK = 1 << 17
"""Elements taken at once, so that their products stay in the cache."""
_COPIED = 1 << 22
"""Most bytes that are copied at once to be read."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


def multiplier(dim: int) -> int:
    """The base of the weights along one dim: odd, and of the largest order (5 mod 8)."""
    return (0x9E3779B97F4A7C15 * (dim + 1)) % MODULUS & ~7 | 5


def digest_piece(tensor: torch.Tensor, box: Box) -> int:
    """The share of one piece in the digest of its logical tensor, in 0 .. 2^64 - 1.

    Args:
        tensor: the piece; any strides, any of the catalogue's dtypes. On another device than the CPU it is copied.
        box: where it lies in the logical tensor.
    """
    words, ranges = _words(tensor, box)
    if words.numel() == 0:
        return 0
    ones = math.prod(_geometric(multiplier(dim), *ends) for dim, ends in enumerate(ranges))
    weights = [_powers(multiplier(dim), *ends) for dim, ends in enumerate(ranges[:-1])]
    last = len(ranges) - 1
    return (_weighted(words, weights, multiplier(last), ranges[last]) + ones) % MODULUS


def digest_within(tensor: torch.Tensor, held: Box, box: Box) -> int:
    """As :func:`digest_piece`, of that part of a piece ``held`` that lies in ``box``; 0 where nothing does."""
    common = intersect(held, box)
    if common is None:
        return 0
    part = tensor[within(common, held)]
    if part.is_contiguous() and part.device.type == "cpu":
        return digest_piece(part, common)
    # What is strided, or on a device, is copied to be read: a little at a time, which no memory bound has to count.
    slabs = tiles(common, tensor.itemsize, _COPIED)
    return sum(digest_piece(tensor[within(slab, held)], slab) for slab in slabs) % MODULUS


def _words(tensor: torch.Tensor, box: Box) -> tuple[torch.Tensor, Box]:
    """The piece as integers of at most 4 bytes with at least one dim, and its index ranges in them."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dim() == 0:
        tensor, box = tensor.reshape(1), ((0, 1),)
    words = tensor.view(torch.uint8 if tensor.dtype in {torch.bool, torch.uint8} else _WORDS[tensor.itemsize])
    if (count := tensor.itemsize // 4) > 1:
        start, stop = box[-1]
        box = (*box[:-1], (count * start, count * stop))
    return words, box


def _weighted(words: torch.Tensor, outer: list[torch.Tensor], base: int, ends: tuple[int, int]) -> int:
    """Sum of words times weights; ``outer`` has the weights of all dims but the last."""
    start, stop = ends
    rows, columns = words.numel() // (stop - start), stop - start
    if rows == 1 and columns > _COLUMNS:
        # One long row: fold it into rows of its own, so that no weight vector is as long as the data.
        whole = columns // _COLUMNS * _COLUMNS
        flat = words.reshape(-1)
        scale = math.prod(int(weights) for weights in outer)
        folded = _powers(pow(base, _COLUMNS, MODULUS), 0, whole // _COLUMNS)
        total = _blocks(flat[:whole].view(-1, _COLUMNS), folded, _powers(base, start, start + _COLUMNS))
        if whole < columns:
            rest = _powers(base, start + whole, stop)
            total += _blocks(flat[whole:].view(1, -1), torch.ones(1, dtype=torch.int64), rest)
        return total * scale
    inner = _powers(base, start, stop)
    while outer and len(outer[-1]) * len(inner) <= _COLUMNS:
        # Many short rows: join dims until rows are long enough to be worth a call.
        *outer, joined = outer
        inner = torch.outer(joined, inner).reshape(-1)
    across = reduce(lambda left, right: torch.outer(left, right).reshape(-1), outer, torch.ones(1, dtype=torch.int64))
    return _blocks(words.view(len(across), len(inner)), across, inner)


def _blocks(words: torch.Tensor, across: torch.Tensor, along: torch.Tensor) -> int:
    """``across @ words @ along``, mod 2^64, block by block."""
    total = 0
    columns = min(words.shape[1], _COLUMNS)
    rows = min(words.shape[0], max(1, _BLOCK // columns))
    # One buffer for all blocks: fresh memory for each would cost more than the arithmetic.
    products = torch.empty(rows * columns, dtype=torch.int64)
    for left in range(0, words.shape[1], columns):
        weights = along[left : left + columns]
        for top in range(0, words.shape[0], rows):
            block = words[top : top + rows, left : left + columns]
            weighted = torch.mul(block, weights, out=products[: block.numel()].view(block.shape))
            total += int((weighted.sum(1) * across[top : top + rows]).sum())
    return total


@lru_cache(maxsize=32)  # layers repeat their shapes; a vector is as long as one dim, 8 bytes each
def _powers(base: int, start: int, stop: int) -> torch.Tensor:
    """``base ** i`` mod 2^64 for i in start .. stop - 1, as int64 with wrap-around."""
    count = stop - start
    found = torch.empty(count, dtype=torch.int64)
    found[0] = _signed(pow(base, start, MODULUS))
    done = 1
    while done < count:
        more = min(done, count - done)
        torch.mul(found[:more], _signed(pow(base, done, MODULUS)), out=found[done : done + more])
        done += more
    return found


def _geometric(base: int, start: int, stop: int) -> int:
    """The sum of ``base ** i`` for i in start .. stop - 1, mod 2^64."""
    # base - 1 has no inverse mod 2^64, but divides the difference exactly.
    modulus = MODULUS * (base - 1)
    return (pow(base, stop, modulus) - pow(base, start, modulus)) % modulus // (base - 1) % MODULUS


def _signed(value: int) -> int:
    return value - MODULUS if value >= MODULUS // 2 else value
