"""Which samples a step trains on: a function of (seed, step) alone.

An epoch is a permutation of all samples, evaluated point by point: a Feistel network over the smallest even number of
bits that holds the count, walked until it lands inside. There is no state, no shuffled list, nothing that
depends on ranks; to stand at a step is to know its number. Batches run on from epoch to epoch without a gap.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
_Words = NDArray[np.uint64]

_ROUNDS = 8


def batch_ids(seed: int, step: int, global_sequences: int, num_samples: int) -> Ids:
    """The samples of step ``step`` (from 0), in order, int64 [global_sequences].

    In each epoch every one of ``num_samples`` samples comes exactly once. Validation uses the same function over the
    validation samples, with the number of the validation batch for the step.
    """
    return ids_from(seed, step * global_sequences, global_sequences, num_samples)


def ids_from(seed: int, first: int, count: int, num_samples: int) -> Ids:
    """``count`` samples behind the ``first`` that were taken, whatever batches those came in; int64 [count]."""
    places = np.arange(first, first + count)
    epochs, within = places // num_samples, places % num_samples
    parts = [permuted(seed, int(epoch), within[epochs == epoch], num_samples) for epoch in np.unique(epochs)]
    return np.concatenate(parts)


def permuted(seed: int, epoch: int, places: Ids, num_samples: int) -> Ids:
    """The samples at ``places`` (each in 0 .. num_samples - 1) of one epoch: a bijection for each (seed, epoch)."""
    half = max(1, -(-(num_samples - 1).bit_length() // 2))
    digest = hashlib.blake2b(f"{seed}/{epoch}/order".encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    found = _feistel(places.astype(np.uint64), keys, half)
    while (outside := found >= num_samples).any():  # at most four places per sample: a few walks
        found[outside] = _feistel(found[outside], keys, half)
    return found.astype(np.int64)


def micro_shares(num_microbatches: int, data_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The micro-batches of each data rank: micro-batch i runs on rank i mod ``data_ranks``.

    Shares differ by at most one. Micro-batch i is samples ``i*m .. (i+1)*m`` of the step's batch, whatever the layout.
    """
    return tuple(tuple(range(rank, num_microbatches, data_ranks)) for rank in range(data_ranks))


def _feistel(words: _Words, keys: _Words, half: int) -> _Words:
    """A bijection of the words of ``2 * half`` bits."""
    shift, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = words >> shift, words & low
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & low)
    return left << shift | right


def _mix(z: _Words) -> _Words:
    """The finaliser of splitmix64; products wrap mod 2^64."""
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)
