"""State that lies in files: each stretch of a file as a view, of which logical box it is.

A *shelf* is a holder like a rank is one: it owns boxes of granules. What a file calls its tensors, whether it has them
transposed or fused with others, and in which dtype, is hidden in the views, so that reading and writing are copies
between boxes like every other move.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from dynatrain.execute.pieces import Pieces
from dynatrain.plan.plan import Fetch, Granule
from dynatrain.space.box import Box, intersect, within
from dynatrain.space.tensor import Catalogue


class Stored:
    """A box of one state of one tensor as it lies in a file.

    Args:
        box: in the coordinates of the logical state; ``()`` for a scalar.
        tensor: a view of the mapped file in the shape of ``box``: any strides, and the file's own dtype; or what makes
            one when it is first asked for. Read-only unless the shelf was made to be written.
        path: the file, for messages.
    """

    def __init__(self, box: Box, tensor: torch.Tensor | Callable[[], torch.Tensor], path: Path) -> None:
        self.box = box
        self.path = path
        self._tensor = tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The view."""
        if not isinstance(self._tensor, torch.Tensor):
            self._tensor = self._tensor()
        return self._tensor


Shelf = Mapping[tuple[str, str], tuple[Stored, ...]]
"""``(tensor name, state name)`` -> its boxes, which do not overlap."""


def boxes_of(shelf: Shelf, catalogue: Catalogue) -> dict[Granule, tuple[Box, ...]]:
    """What a shelf owns, as the plan numbers it. States that it has not are absent."""
    return {
        (index, number): tuple(stored.box for stored in shelf[tensor.name, state.name])
        for index, tensor in enumerate(catalogue)
        for number, state in enumerate(tensor.states)
        if (tensor.name, state.name) in shelf
    }


def read_into(pieces: Pieces, shelf: Shelf, catalogue: Catalogue, fetches: Iterable[Fetch]) -> None:
    """Copy what a plan names from the files into a rank's pieces; dtypes are converted."""
    with torch.no_grad():
        for fetch in fetches:
            tensor, piece = catalogue[fetch.granule[0]], pieces[fetch.granule]
            stored = shelf[tensor.name, tensor.states[fetch.granule[1]].name][fetch.place]
            piece.tensor[within(fetch.box, piece.box)] = stored.tensor[within(fetch.box, stored.box)]


def copy(source: Shelf, target: Shelf) -> None:
    """Copy all that ``target`` has room for from ``source``, view to view, where one process sees both.

    Both hold each of their states whole and once (:func:`dynatrain.judge.shelves.judge_shelf`); dtypes are converted.
    """
    with torch.no_grad():
        for key, rooms in target.items():
            for room in rooms:
                for stored in source[key]:
                    common = intersect(room.box, stored.box)
                    if common is not None:
                        room.tensor[within(common, room.box)] = stored.tensor[within(common, stored.box)]
