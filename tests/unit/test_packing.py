"""What a rank sends to its keeper is there what it was here, in chunks of any size."""

import pytest
import torch
from tests.stamped import job, owns, same_bits, stamp

from dynatrain.execute.packing import packed, packed_bytes, unpacked
from dynatrain.execute.pieces import Piece
from dynatrain.plan.keepers import kept_boxes

JOB = job()


@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 1 << 20])
@pytest.mark.parametrize("text", ["fsdp4", "fsdp3", "pp2.tp2", "pp4"])
def test_pieces_are_what_they_were_behind_chunks_of_any_size(text, chunk_bytes):
    boxes = kept_boxes(JOB, owns(JOB, text), 1)
    pieces = {granule: Piece(stamp(JOB, granule, box).contiguous(), box) for granule, box in boxes.items()}
    assert boxes

    chunks = list(packed(JOB, boxes, pieces, chunk_bytes))
    flat = torch.cat(chunks)

    assert len(flat) == packed_bytes(JOB, boxes)
    assert all(len(chunk) == chunk_bytes for chunk in chunks[:-1])
    found = unpacked(JOB, boxes, flat)
    assert found.keys() == pieces.keys()
    assert all(same_bits(found[g].tensor, piece.tensor) and found[g].box == piece.box for g, piece in pieces.items())


def test_who_alone_has_nothing_packs_nothing():
    assert packed_bytes(JOB, {}) == 0
    assert list(packed(JOB, {}, {}, 8)) == []
