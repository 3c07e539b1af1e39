"""Digests: equal under any cut, sensitive to order and place, named when they differ."""

import importlib.util
import itertools
import pathlib
import random

import numpy as np
import pytest
import torch
from tests.stamped import box_of, granules, job, owns, stamp

from dynatrain.execute import digest
from dynatrain.execute.census import compare, digest_vector
from dynatrain.execute.digest import MODULUS, digest_piece, digest_within
from dynatrain.execute.locate import first_difference
from dynatrain.execute.pieces import Piece
from dynatrain.space.box import shape_of, whole, within
from dynatrain.space.ownership import num_holders

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex128, torch.complex64, torch.uint64, torch.uint32, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
SHAPES = [(), (1,), (7,), (0,), (3, 0), (5, 6), (4, 3, 2), (2, 3, 2, 5), (20_001,), (1, 9_000), (3, 8_200)]
JOB = job()


def values(shape, dtype, seed=0):
    draw = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.complex(*(values(shape, torch.float64, seed + i) for i in range(2))).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
    return torch.randint(-128, 128, shape, generator=draw).to(dtype)


def snippet():
    path = pathlib.Path(__file__).parents[2] / "docs" / "digest.py"
    spec = importlib.util.spec_from_file_location("docs_digest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.digest


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_fifteen_lines_in_the_docs_give_the_same_digest(shape, dtype):
    tensor = values(shape, dtype)
    bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.int8, torch.float8_e5m2: torch.int8}
    raw = tensor.view(bits.get(dtype, dtype))
    assert snippet()(raw.numpy()) == digest_piece(tensor, whole(shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape and 0 not in shape], ids=str)
def test_any_cut_adds_up_to_the_same_digest(shape, dtype):
    tensor, draw = values(shape, dtype), random.Random(3)
    for _ in range(3):
        edges = [sorted([0, size, draw.randint(0, size), draw.randint(0, size)]) for size in shape]
        total = 0
        for box in itertools.product(*[list(itertools.pairwise(edge)) for edge in edges]):
            total += digest_piece(tensor[within(box, whole(shape))], box)
        assert total % MODULUS == digest_piece(tensor, whole(shape))


def test_blocks_do_not_show(monkeypatch):
    tensor = values((37, 3, 50), torch.float32)
    expected = digest_piece(tensor, whole(tensor.shape))
    for columns, block in ((8, 16), (1, 1), (150, 300), (7, 1000)):
        monkeypatch.setattr(digest, "_COLUMNS", columns)
        monkeypatch.setattr(digest, "_BLOCK", block)
        assert digest_piece(tensor, whole(tensor.shape)) == expected
        assert digest_piece(tensor.reshape(-1), ((0, tensor.numel()),)) == snippet()(tensor.reshape(-1).numpy())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bfloat16], ids=str)
def test_order_and_place_count(dtype):
    tensor = values((2048, 4), dtype)
    tensor[0], tensor[1024] = 1.0, 2.0  # round numbers, a power of two apart: high bits only, twice
    box = whole((2048, 4))
    first = digest_piece(tensor, box)
    rows = list(range(2048))
    rows[0], rows[1024] = rows[1024], rows[0]
    assert digest_piece(tensor[rows], box) != first
    assert digest_piece(tensor.flip(1), box) != first
    assert digest_piece(tensor[:1000], ((0, 1000), (0, 4))) != digest_piece(tensor[:1000], ((1, 1001), (0, 4)))


def test_a_zero_that_is_missing_or_held_twice_shows():
    zeros = torch.zeros(6, 4)
    assert len({digest_piece(zeros[:rows], ((0, rows), (0, 4))) for rows in range(7)}) == 7


def test_one_flipped_bit_always_shows():
    tensor = values((11, 5), torch.float32)
    before = digest_piece(tensor, whole((11, 5)))
    for bit in range(32):
        spoiled = tensor.clone()
        spoiled.view(torch.int32)[10, 3] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
        assert digest_piece(spoiled, whole((11, 5))) != before


def held(ownership, rank):
    boxes = {granule: box_of(JOB, ownership, granule, rank) for granule in granules(JOB)}
    return {g: Piece(stamp(JOB, g, box).clone(), box) for g, box in boxes.items() if box is not None}


def vector(ownership, cut, pieces):
    return sum(digest_vector(pieces[r], JOB, ownership, cut, r) for r in range(num_holders(ownership)))


def pieces_of(ownership):
    return [held(ownership, rank) for rank in range(num_holders(ownership))]


@pytest.mark.parametrize(
    "ends",
    [("fsdp4", "fsdp2.tp2"), ("dp2.fsdp2", "pp2.tp2"), ("pp4", "dp4"), ("tp4", "fsdp3"), ("dp1", "pp2.dp2.tp2")],
    ids="-".join,
)
def test_every_copy_of_everything_is_compared(ends):
    old, new = (owns(JOB, text) for text in ends)
    before, after = vector(old, new, pieces_of(old)), vector(new, new, pieces_of(new))
    report = compare(before, after, JOB, old, new)
    assert report.equal
    assert report.before == report.after
    assert report.unequal == report.differing == ()


@pytest.mark.parametrize("text", ["fsdp4", "dp2.fsdp2", "pp2.tp2", "fsdp2.tp2"])
def test_one_rank_may_answer_for_any_others_and_the_digests_are_those_of_all(text):
    old, new = owns(JOB, text), owns(JOB, "fsdp3")
    every = pieces_of(old)
    others = {rank: pieces for rank, pieces in enumerate(every) if rank != 1}
    alone = digest_vector(every[1], JOB, old, new, 1, lost=others)
    assert alone.equal(vector(old, new, every))
    del others[3]
    assert not digest_vector(every[1], JOB, old, new, 1, lost=others).equal(vector(old, new, every))


def test_copies_are_compared_across_worlds_of_other_members():
    old, new = owns(JOB, "fsdp2.tp2"), owns(JOB, "dp2.fsdp2", members=(0, 5, 3, 4))
    targets = pieces_of(new)
    assert compare(vector(old, new, pieces_of(old)), vector(new, new, targets), JOB, old, new).equal
    targets[5][1, 1].tensor.view(torch.int32)[2, 4] ^= 1
    report = compare(vector(old, new, pieces_of(old)), vector(new, new, targets), JOB, old, new)
    assert [(found.tensor, found.rank) for found in report.differing] == [("layers.0.wq", 5)]


def test_the_whole_digest_does_not_depend_on_the_layout():
    texts = ["fsdp4", "dp2.tp2", "pp4", "dp1", "pp2.fsdp2"]
    found = set()
    for text in texts:
        there = owns(JOB, text)
        found.update(compare(*[vector(there, there, pieces_of(there))] * 2, JOB, there, there).before.items())
    assert len(found) == len({kind for kind, _ in found})


def test_a_spoiled_piece_is_named_with_its_rank_and_index():
    old, new = owns(JOB, "fsdp4"), owns(JOB, "dp2.tp2", (2, 0, 3, 1))
    sources, targets = pieces_of(old), pieces_of(new)
    granule, victim = (1, 1), 3
    piece = targets[victim][granule]
    piece.tensor.view(torch.int32)[2, 4] ^= 1
    report = compare(vector(old, new, sources), vector(new, new, targets), JOB, old, new)
    (found,) = report.differing
    assert not report.equal
    assert report.before != report.after
    assert (found.tensor, found.state, found.rank, found.box) == ("layers.0.wq", "exp_avg", victim, piece.box)

    def equal(box):
        was = sum(digest_within(holder[granule].tensor, holder[granule].box, box) for holder in sources)
        return was % MODULUS == digest_within(piece.tensor, piece.box, box)

    assert first_difference(found.box, equal) == (piece.box[0][0] + 2, piece.box[1][0] + 4)


def test_copies_that_differed_before_the_switch_are_named():
    old, new = owns(JOB, "dp4"), owns(JOB, "tp4")
    sources = pieces_of(old)
    sources[2][4, 3].tensor.add_(1)  # a step counter
    report = compare(vector(old, new, sources), vector(new, new, pieces_of(new)), JOB, old, new)
    assert not report.equal
    assert report.unequal == (("layers.1.wq", "step", 2),)
    assert report.differing == ()
    assert report.groups > len(granules(JOB))


def test_the_first_difference_in_row_major_order_is_found():
    shape = (5, 4, 7)
    for places in ([(4, 3, 6)], [(0, 0, 0)], [(2, 1, 3), (2, 1, 5), (3, 0, 0)], [(1, 3, 0), (1, 0, 6)]):
        one, other = torch.zeros(shape), torch.zeros(shape)
        for place in places:
            other[place] = 1
        asked = []

        def equal(box, one=one, other=other, asked=asked):
            asked.append(box)
            return digest_within(one, whole(shape), box) == digest_within(other, whole(shape), box)

        assert first_difference(whole(shape), equal) == min(places)
        assert len(asked) <= 8
        assert all(np.prod(shape_of(box)) < 140 for box in asked)
