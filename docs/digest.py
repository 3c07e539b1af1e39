# ruff: noqa: INP001 - a script to copy, not a package
"""The digest of one whole tensor, by numpy alone. bfloat16 and float8 are passed as bit patterns (uint16, int8)."""

import numpy as np


def digest(tensor: np.ndarray) -> int:
    """Sum over all elements of (bits + 1) times one multiplier power per dim, mod 2^64."""
    bits = np.ascontiguousarray(np.atleast_1d(tensor))
    kind = "u1" if tensor.dtype in (np.uint8, np.bool_) else f"i{min(tensor.itemsize, 4)}"  # 8 bytes: two words
    terms = bits.view(kind).astype(np.int64).astype(np.uint64) + np.uint64(1)
    for dim, size in enumerate(terms.shape):
        base = (0x9E3779B97F4A7C15 * (dim + 1)) % 2**64 & ~7 | 5
        powers = np.array([pow(base, index, 2**64) for index in range(size)], dtype=np.uint64)
        terms *= powers.reshape([-1 if other == dim else 1 for other in range(terms.ndim)])
    return int(terms.sum(dtype=np.uint64))
