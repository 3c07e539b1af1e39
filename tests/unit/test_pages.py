"""Memory by pages: gone when given back, read without pinning it."""

import ctypes
import multiprocessing
from pathlib import Path

import torch

from dynatrain.execute.pages import memory_of, touch
from dynatrain.execute.pieces import Piece, Pool

MIB = 1 << 20


def resident():
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def in_a_process_of_its_own(claim):
    """What other tests left in the C library's heap would serve, or hold, some of the memory that is counted."""
    child = multiprocessing.get_context("spawn").Process(target=claim)
    child.start()
    child.join()
    return child.exitcode == 0


def given_back_between_pieces_that_stay():
    # As after some steps of training, when the C library has learnt to keep what is freed.
    ctypes.CDLL(None).mallopt(-3, 32 * MIB)
    pool = Pool()
    pieces = [Piece(pool.allocate((MIB,), torch.uint8), ((0, MIB),)) for _ in range(64)]
    for piece in pieces:
        touch(piece.tensor)
    full = resident()
    for piece in pieces[::2]:
        pool.give_back(piece)
    assert full - resident() > 28 * MIB
    for piece in pieces[::2]:
        pool.restore(piece)
        touch(piece.tensor)
    assert abs(resident() - full) < 4 * MIB


def test_memory_that_is_given_back_between_pieces_that_stay_leaves_the_process_at_once():
    assert in_a_process_of_its_own(given_back_between_pieces_that_stay)


def given_back_out_of_the_heap():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    libc.mallopt(-3, 32 * MIB)
    parts = [libc.malloc(20 * MIB) for _ in range(4)]
    libc.malloc(3 * MIB)  # above them, so that the heap does not shrink
    for part in parts:
        libc.free(part)
    pool = Pool()
    piece = Piece(pool.allocate((64 * MIB,), torch.uint8), ((0, 64 * MIB),))
    assert parts[0] <= piece.tensor.data_ptr() < parts[-1]
    touch(piece.tensor)
    full = resident()
    pool.give_back(piece)
    assert full - resident() > 60 * MIB


def test_memory_that_came_from_a_hole_in_the_heap_leaves_the_process_at_once_too():
    assert in_a_process_of_its_own(given_back_out_of_the_heap)


def touched_to_the_last_page():
    pool = Pool()
    before = resident()
    tensor = pool.allocate((32 * MIB + 1,), torch.uint8)
    touch(tensor)
    assert resident() - before >= 32 * MIB
    assert tensor[-1] == 0


def test_touched_memory_is_resident_to_its_last_page():
    assert in_a_process_of_its_own(touched_to_the_last_page)


def test_reading_the_bytes_of_a_tensor_leaves_its_storage_resizable():
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3)
    assert bytes(memory_of(tensor)) == bytes(tensor.clone().numpy().tobytes())
    assert memory_of(tensor).readonly
    assert tensor.untyped_storage().resizable()
    assert bytes(memory_of(torch.empty(0))) == b""
