"""Naming the first element that differs, by asking for digests of ever smaller boxes."""

from collections.abc import Callable

from dynatrain.space.box import Box


def first_difference(box: Box, equal: Callable[[Box], bool]) -> tuple[int, ...]:
    """The index of the first element, in row-major order, that differs in ``box``.

    Asks about log2 of the volume questions, and the same ones on every rank that gets the same answers.

    Args:
        box: known to differ.
        equal: whether the digests of a box agree before and after; sums over the ranks itself.
    """
    for dim in range(len(box)):
        start, stop = box[dim]
        while stop - start > 1:
            middle = (start + stop) // 2
            half = (*box[:dim], (start, middle), *box[dim + 1 :])
            start, stop = (middle, stop) if equal(half) else (start, middle)
        box = (*box[:dim], (start, stop), *box[dim + 1 :])
    return tuple(start for start, _ in box)
