"""Reading the memory of another process of this machine: one copy, made by the kernel.

State stays in each rank's private memory, and there is nothing with a name that somebody would have to clean up: no
segment is left behind when ranks are killed, and ``/dev/shm`` is not used. A process may read what it may trace: of the
same user, in the same process namespace; a container may forbid it.
"""

import ctypes
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)
_MOST_SPANS = 1023
"""The kernel takes 1024 a call; a call that begins inside a span has one more."""

_AT_ONCE = 4 << 20
"""Bytes of one call: deadlines are looked at in between."""


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Equally long stretches of memory, in the order of what lies in them.

    Attributes:
        starts: addresses.
        length: bytes of each.
    """

    starts: npt.NDArray[np.int64]
    length: int

    @classmethod
    def of(cls, address: int, shape: Sequence[int], strides: Sequence[int]) -> "Spans":
        """Those of an array of bytes in row-major order; ``strides`` in bytes too."""
        length, outer = 1, []
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            if not outer and (size == 1 or stride == length):
                length *= size
            elif size != 1:
                outer.append((size, stride))
        starts = np.array([address], np.int64)
        for size, stride in reversed(outer):
            starts = np.add.outer(starts, np.arange(size) * stride).reshape(-1)
        return cls(starts, length)

    @property
    def nbytes(self) -> int:
        """Bytes of all together."""
        return len(self.starts) * self.length

    def part(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """``(address, bytes)`` of each stretch of bytes ``first`` to ``last``, as the kernel wants them."""
        low, high = first // self.length, -(-last // self.length)
        found = np.empty((high - low, 2), np.int64)
        found[:, 0], found[:, 1] = self.starts[low:high], self.length
        found[0] += (first - low * self.length, low * self.length - first)
        found[-1, 1] -= high * self.length - last
        return found


def read(process: int, source: Spans, target: Spans, deadline: float) -> None:
    """Copy what lies in ``source`` of another process into ``target`` of this one; both have equally many bytes.

    Args:
        process: its number.
        source: its memory; it must not write or free it meanwhile.
        target: of this process.
        deadline: on the monotonic clock, in seconds.

    Raises:
        TimeoutError: the deadline has passed.
        OSError: the process is gone or may not be read, or has no such memory.
    """
    finest = min(source.length, target.length)
    step = finest * max(1, min(_MOST_SPANS, _AT_ONCE // finest)) if finest < _AT_ONCE else _AT_ONCE
    done = 0
    while done < target.nbytes:
        if time.monotonic() > deadline:
            raise TimeoutError
        last = min(done + step, target.nbytes)
        here, there = target.part(done, last), source.part(done, last)
        came = _LIBC.process_vm_readv(
            process,
            ctypes.c_void_p(here.ctypes.data),
            ctypes.c_ulong(len(here)),
            ctypes.c_void_p(there.ctypes.data),
            ctypes.c_ulong(len(there)),
            ctypes.c_ulong(0),
        )
        if came <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        done += came


def let_others_read() -> None:
    """Allow other processes of this user to read this one, where the kernel wants to be asked (Yama)."""
    _LIBC.prctl(_SET_PTRACER, _ANY, 0, 0, 0)


def machine() -> int:
    """A number that processes share which see each other's numbers; another one each where that is not known."""
    try:
        boot, space = Path("/proc/sys/kernel/random/boot_id").read_text("ascii"), Path("/proc/self/ns/pid").readlink()
        seen = f"{boot}{space}".encode()
    except OSError:
        seen = os.urandom(8)
    return int.from_bytes(hashlib.blake2b(seen, digest_size=8).digest(), "little", signed=True)
