"""Pieces one behind the other as bytes, and pieces as views of such bytes: how a rank's boxes lie at its keeper's."""

from collections.abc import Iterator, Mapping

import torch

from dynatrain.execute.pieces import Piece, Pieces
from dynatrain.plan.plan import Granule
from dynatrain.space.box import Box, shape_of, volume
from dynatrain.space.tensor import ITEMSIZE, Catalogue

ALIGNED = 16
"""Bytes at whose multiples each piece begins: a view of any dtype may."""


def packed_bytes(catalogue: Catalogue, boxes: Mapping[Granule, Box]) -> int:
    """Bytes of these pieces, packed."""
    return max((last for _, _, last in _spans(catalogue, boxes)), default=0)


def packed(
    catalogue: Catalogue, boxes: Mapping[Granule, Box], pieces: Pieces, chunk_bytes: int
) -> Iterator[torch.Tensor]:
    """The bytes of some pieces, in chunks, uint8; the last one may be shorter.

    Args:
        catalogue: all tensors.
        boxes: of which granules; each is that of the piece.
        pieces: have them; contiguous, on the host.
        chunk_bytes: of one chunk.
    """
    length, spans = packed_bytes(catalogue, boxes), list(_spans(catalogue, boxes))
    for start in range(0, length, chunk_bytes):
        chunk = torch.zeros(min(chunk_bytes, length - start), dtype=torch.uint8)
        for granule, first, last in spans:
            low, high = max(first, start), min(last, start + len(chunk))
            if low < high:
                data = pieces[granule].tensor.view(-1).view(torch.uint8)
                chunk[low - start : high - start] = data[low - first : high - first]
        yield chunk


def unpacked(catalogue: Catalogue, boxes: Mapping[Granule, Box], flat: torch.Tensor) -> Pieces:
    """Pieces as views of the bytes of all chunks, in ``flat``."""
    found = {}
    for granule, first, last in _spans(catalogue, boxes):
        dtype = getattr(torch, catalogue[granule[0]].states[granule[1]].dtype)
        found[granule] = Piece(flat[first:last].view(dtype).view(shape_of(boxes[granule])), boxes[granule])
    return found


def _spans(catalogue: Catalogue, boxes: Mapping[Granule, Box]) -> Iterator[tuple[Granule, int, int]]:
    """Where each box lies among the bytes, from where to where."""
    at = 0
    for granule, box in sorted(boxes.items()):
        nbytes = volume(box) * ITEMSIZE[catalogue[granule[0]].states[granule[1]].dtype]
        yield granule, at, at + nbytes
        at += -(-nbytes // ALIGNED) * ALIGNED
