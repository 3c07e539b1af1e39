"""Naming the first element that differs, by asking for digests of ever smaller boxes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dynatrain.execute.digest import MODULUS, digest_within
from dynatrain.execute.pieces import Piece
from dynatrain.plan.plan import Granule
from dynatrain.space.box import Box


@dataclass(frozen=True, slots=True)
class Side:
    """One of two copies of a granule that are to be compared.

    Attributes:
        pieces: what this rank holds on this side.
        boxes: the box of the copy's piece by rank; only of the ranks whose pieces make up the copy.
    """

    pieces: Mapping[Granule, Piece]
    boxes: Mapping[int, Box]

    def share(self, granule: Granule, box: Box, rank: int) -> int:
        """This rank's part of the digest of ``box``, in the signed form that sums with wrap-around."""
        if rank not in self.boxes:
            return 0
        value = digest_within(self.pieces[granule].tensor, self.boxes[rank], box)
        return value - MODULUS if value >= MODULUS // 2 else value

    def holder(self, index: tuple[int, ...]) -> int:
        """The rank that holds one element of the copy."""
        for rank, box in self.boxes.items():
            if all(start <= at < stop for at, (start, stop) in zip(index, box, strict=True)):
                return rank
        raise AssertionError(f"no rank holds {index}")


def first_unlike(
    one: Side, other: Side, granule: Granule, box: Box, rank: int, total: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[int, ...]:
    """The index of the first element in ``box`` in which two copies differ. Every rank calls it alike.

    Args:
        one: a copy.
        other: another one.
        granule: of which tensor and state.
        box: known to differ.
        rank: this rank.
        total: adds an int64 vector up over the ranks.
    """

    def equal(part: Box) -> bool:
        left, right = total(torch.tensor([side.share(granule, part, rank) for side in (one, other)])).tolist()
        return bool(left == right)

    return first_difference(box, equal)


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
