"""The slow twin: a plan carried out on arrays in memory, in a way that a reader believes at sight.

Every element of every state is its own number, its address stamp; new storage starts as NaN.
"""

import numpy as np

from dynatrain.space.box import shape_of, volume, within


def stamps(catalogue):
    """``(tensor, state)`` -> the whole state, each element a number that occurs nowhere else."""
    found, start = {}, 1
    for index, tensor in enumerate(catalogue):
        for at, state in enumerate(tensor.states):
            shape = tensor.state_shape(state)
            size = int(np.prod(shape))
            found[index, at] = np.arange(start, start + size, dtype=np.float64).reshape(shape)
            start += size
    return found


def piece_box(tensor, state, ownership, rank):
    """The box that ``rank`` holds of one state; None outside the tensor's stages and outside the world."""
    if rank not in (ownership.layout.order or range(ownership.layout.world_size)):
        return None
    box = ownership.box(tensor, rank)
    return None if box is None else state.box(box, tensor.shape)


def expected(catalogue, ownership, world):
    """``(rank, tensor, state)`` -> the stamps that the rank holds under ``ownership``."""
    whole = stamps(catalogue)
    found = {}
    for (rank, index), held in _boxes(catalogue, ownership).items():
        for at, state in enumerate(catalogue[index].states if rank < world else ()):
            box = state.box(held, catalogue[index].shape)
            found[rank, index, at] = whole[index, at][tuple(slice(a, b) for a, b in box)].copy()
    return found


def materialize(catalogue, old, new, parts):
    """Carries ``parts`` out round by round, giving up old pieces after their round: what the ranks hold at the end."""
    held = expected(catalogue, old, len(parts))
    before, after = (_boxes(catalogue, ownership) for ownership in (old, new))
    moves = _by_granule(parts)
    made = {}
    for granules in parts[0].schedule.rounds:
        for tensor, state in granules:
            shape, kind = catalogue[tensor].shape, catalogue[tensor].states[state]
            for part in parts:
                if (mine := after.get((part.rank, tensor))) is None:
                    continue
                box = kind.box(mine, shape)
                target = np.full(shape_of(box), np.nan)
                if (tensor, state) in part.adopted:
                    target = held[part.rank, tensor, state]
                for move in moves.get((part.rank, tensor, state), ()):
                    source = held[move.src, tensor, state]
                    where = kind.box(before[move.src, tensor], shape)
                    target[within(move.box, box)] = source[within(move.box, where)]
                made[part.rank, tensor, state] = target
        for tensor, state in granules:
            for part in parts:
                held.pop((part.rank, tensor, state), None)
    return made


def _boxes(catalogue, ownership):
    """``(rank, tensor)`` -> the box that the rank holds; nothing where another stage holds the tensor."""
    return {
        (rank, index): box
        for rank in range(ownership.layout.world_size)
        for index, tensor in enumerate(catalogue)
        if (box := ownership.box(tensor, rank)) is not None
    }


def _by_granule(parts):
    """``(rank, tensor, state)`` -> the moves that come to it, in the order of the plan."""
    found = {}
    for part in parts:
        for move in (*part.receives, *part.relays):
            for state in move.states:
                found.setdefault((part.rank, move.tensor, state), []).append(move)
    return found


def brute_force_holders(tensor, state, box, ownership):
    """Ranks whose piece of a state holds all of ``box``, by looking at every rank."""
    found = []
    for rank in ownership.layout.ranks:
        piece = piece_box(tensor, state, ownership, rank)
        if piece is not None and all(c <= a and b <= d for (a, b), (c, d) in zip(box, piece, strict=True)):
            found.append(rank)
    return found if volume(box) else []
