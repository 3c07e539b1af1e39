"""A hash of moves that no order of dicts, sets or ranks can change, to see that all ranks carry out one plan.

Every ``(tensor, state, box, src, dst)`` has a 64-bit hash; a plan's is their sum. So ranks add theirs up: once what
they send and once what they receive, a relay being both. The two sums must agree. Names, not indices, go in.
"""

import numpy as np
import numpy.typing as npt
import xxhash

from dynatrain.plan.plan import RankPlan
from dynatrain.plan.table import MoveTable, table
from dynatrain.space.tensor import Catalogue

_Hashes = npt.NDArray[np.uint64]


def plan_hash(catalogue: Catalogue, moves: MoveTable) -> int:
    """Sum modulo 2**64 of the hashes of all moves, one per state."""
    with np.errstate(over="ignore"):
        body = np.zeros(len(moves.tensor), np.uint64)
        for column in (moves.src, moves.dst):
            body = _mix(body ^ column.astype(np.uint64))
        for dim, (low, high) in enumerate(zip(moves.low.T, moves.high.T, strict=True)):
            # (0, 1) also stands for a dim that the tensor lacks: it adds nothing, so wider tables have equal hashes.
            bounds = _mix(
                _mix(body ^ _mix(np.array([dim + 1], np.uint64)) ^ low.astype(np.uint64)) ^ high.astype(np.uint64)
            )
            body = np.where((low == 0) & (high == 1), body, bounds)
        total = np.uint64(0)
        for group, states in enumerate(moves.groups):
            rows = np.flatnonzero(moves.group == group)
            for state in states:
                name = _names(catalogue, moves.tensor[rows], state)
                total += _mix(body[rows] ^ name).sum(dtype=np.uint64)
    return int(total)


def sent_hash(catalogue: Catalogue, part: RankPlan) -> int:
    """The share of one rank in the plan's hash, counted by senders."""
    return plan_hash(catalogue, table((*part.sends, *part.relays)))


def received_hash(catalogue: Catalogue, part: RankPlan) -> int:
    """The share of one rank in the plan's hash, counted by receivers."""
    return plan_hash(catalogue, table((*part.receives, *part.relays)))


def _names(catalogue: Catalogue, tensors: npt.NDArray[np.int64], state: int) -> _Hashes:
    found, where = np.unique(tensors, return_inverse=True)
    names = (f"{catalogue[i].name}\0{catalogue[i].states[state].name}".encode() for i in found)
    return np.array([xxhash.xxh3_64_intdigest(name) for name in names], np.uint64)[where]


def _mix(words: _Hashes) -> _Hashes:
    """A bijection of 64-bit words in which every input bit reaches every output bit (multiply, fold, twice)."""
    words = (words + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xFF51AFD7ED558CCD)
    words = (words ^ (words >> np.uint64(32))) * np.uint64(0xC4CEB9FE1A85EC53)
    return words ^ (words >> np.uint64(29))
