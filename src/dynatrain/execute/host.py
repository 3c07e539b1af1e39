"""Memory of the host for state that has left its device: one segment for all of it, given back as a whole.

The segment is a file without a name (memfd), so nothing of it is left when its process has ended, however that ended,
and a small ``/dev/shm`` does no harm. While nobody reads it, its pages are taken out of the process: what is parked
counts as the machine's memory, and no longer as this process's.
"""

import mmap
import os

import torch

ALIGNMENT = 64
"""Bytes: where a tensor may begin."""


def room_for(nbytes: int, pieces: int) -> int:
    """Bytes of a segment that takes so many pieces of ``nbytes`` together."""
    return -(-(nbytes + ALIGNMENT * pieces) // mmap.PAGESIZE) * mmap.PAGESIZE


class HostSegment:
    """One segment, from which tensors are cut one after the other.

    Args:
        nbytes: of it; see :func:`room_for`. Pages are taken from the system as they are written.

    Attributes:
        nbytes: likewise; 0 once it was closed.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._end = 0
        file = os.memfd_create("dynatrain-parked", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, nbytes)
            self._memory = mmap.mmap(file, nbytes)
        finally:
            os.close(file)  # the mapping has a descriptor of its own

    def cut(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor; contiguous, zeros. It must not be used after :meth:`close`."""
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._end = start + count * dtype.itemsize
        assert self._end <= self.nbytes
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).view(shape)

    def rest(self) -> None:
        """Take its pages out of this process; whoever reads or writes one gets it back, as it was."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Give its memory back to the system at once, whoever still refers to it."""
        if self.nbytes:
            self._memory.madvise(mmap.MADV_REMOVE)
            self.nbytes = 0
