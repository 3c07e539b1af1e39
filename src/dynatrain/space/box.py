"""Boxes: half-open rectangles in the index space of one logical tensor."""

import math
from collections.abc import Iterator

Box = tuple[tuple[int, int], ...]
"""One ``(start, stop)`` per tensor dim; ``()`` is the one element of a scalar. Empty where any ``start == stop``."""


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor of ``shape``."""
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Number of elements in ``box``."""
    return math.prod(stop - start for start, stop in box)


def shape_of(box: Box) -> tuple[int, ...]:
    """Size of ``box`` along each dim."""
    return tuple(stop - start for start, stop in box)


def intersect(one: Box, other: Box) -> Box | None:
    """The common part of two boxes of one tensor, or None where they share no element."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Slices that select ``inner`` out of local storage that holds ``outer``."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))


def chunk(start: int, stop: int, ways: int, index: int) -> tuple[int, int]:
    """Part ``index`` of ``[start, stop)`` cut ``ways`` ways as torch cuts it: ceil-sized parts, the last ones short.

    Trailing parts may be empty (5 rows over 4 ways: 2, 2, 1, 0).
    """
    size = -(-(stop - start) // ways)
    first = min(start + index * size, stop)
    return first, min(first + size, stop)


def tiles(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Cut ``box`` into boxes of at most ``limit`` bytes whose elements are consecutive in its row-major order."""
    nbytes = volume(box) * itemsize
    if nbytes <= limit:
        yield box
        return
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    rows = max(1, limit * (stop - start) // nbytes)
    for first in range(start, stop, rows):
        yield from tiles((*box[:dim], (first, min(first + rows, stop)), *box[dim + 1 :]), itemsize, limit)
