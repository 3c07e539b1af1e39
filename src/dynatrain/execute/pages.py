"""Memory of the host by pages: what is given back is gone at once, and new pages come cheaply.

The C library keeps freed memory for later, and of torch's aligned requests a freed place can rarely serve another of
the same size: after a few switches a process would hold its state several times over. Memory that is mapped apart goes
back to the system as it is freed, so that what is resident is what is counted. The library maps apart only where no
hole in its heap is large enough; what came from such a hole stays with it, so its pages are discarded beforehand.
"""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

APART_FROM = 128 << 10
"""Bytes from which on memory can be mapped apart; less shares pages with its neighbours."""

_LIBC = ctypes.CDLL(None)
_BUF_READ = 0x100
_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory.restype = ctypes.py_object
_M_MMAP_THRESHOLD = -3
_USUAL = 32 << 20  # where the C library's own adaptation of the threshold ends
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_HUGE = 2 << 20


@contextmanager
def mapped_apart() -> Iterator[None]:
    """Tensors of at least :data:`APART_FROM` bytes that are made inside get pages of their own.

    The C library has one threshold for all threads: what others allocate meanwhile may be mapped, too, which is right
    but slow. So use it for state, not around a training step.
    """
    _LIBC.mallopt(_M_MMAP_THRESHOLD, APART_FROM)
    try:
        yield
    finally:
        _LIBC.mallopt(_M_MMAP_THRESHOLD, _USUAL)


def prefer_huge(storage: torch.UntypedStorage) -> None:
    """Ask for huge pages under memory that was mapped apart; a kernel without them ignores it.

    The first write to a page has the kernel find and clear it. In pages of 4 KiB that costs several times the write
    itself, and in ``tight`` mode it happens inside the stall.
    """
    if storage.nbytes() >= APART_FROM:
        # Outwards to whole pages: the kernel joins mappings that touch, and one huge page then lies under several.
        start = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-(storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE) * mmap.PAGESIZE
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)


def discard(storage: torch.UntypedStorage) -> None:
    """Give the system the pages under a storage on the host that is freed next; its content is lost."""
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE  # inwards: what lies beside it stays
    stop = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if storage.nbytes() >= APART_FROM:
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED)


def give_up_spare() -> None:
    """Give the system what the C library keeps of freed memory, of all threads.

    What one layout's steps have left in its heap rarely fits the next one's: over a few switches it grew by half. The
    next step faults in anew what it uses of it.
    """
    _LIBC.malloc_trim(0)


def touch(tensor: torch.Tensor) -> None:
    """Write to every page from a tensor's first element to its last; what lies there must not matter yet.

    Strides are as of a segment of a fused tensor: its neighbours' content does not matter yet either.
    """
    if tensor.numel():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = (last + 1) * tensor.itemsize
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        flat.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize, (nbytes,))
        flat[:: mmap.PAGESIZE] = 0
        flat[-1] = 0


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, to be read while the caller holds the tensor.

    Not ``Tensor.numpy()``: it marks the storage as not resizable for good, and then it can never be given back.
    """
    view: memoryview = _memory(tensor.data_ptr(), tensor.nbytes, _BUF_READ) if tensor.nbytes else memoryview(b"")
    return view
