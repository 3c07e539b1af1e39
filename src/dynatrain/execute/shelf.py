"""State that lies in files: each stretch of a file as a view, of which logical box it is.

A *shelf* is a holder like a rank is one: it owns boxes of granules. What a file calls its tensors, whether it has them
transposed or fused with others, and in which dtype, is hidden in the views, so that reading and writing are copies
between boxes like every other move.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dynatrain.space.box import Box


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A box of one state of one tensor as it lies in a file.

    Attributes:
        box: in the coordinates of the logical state; ``()`` for a scalar.
        tensor: a view of the mapped file in the shape of ``box``: any strides, and the file's own dtype. Read-only
            unless the shelf was made to be written.
        path: the file, for messages.
    """

    box: Box
    tensor: torch.Tensor
    path: Path


Shelf = Mapping[tuple[str, str], tuple[Stored, ...]]
"""``(tensor name, state name)`` -> its boxes, which do not overlap."""
