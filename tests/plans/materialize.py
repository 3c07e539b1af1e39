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
    for rank in range(world):
        for index, tensor in enumerate(catalogue):
            for at, state in enumerate(tensor.states):
                box = piece_box(tensor, state, ownership, rank)
                if box is not None:
                    found[rank, index, at] = whole[index, at][tuple(slice(a, b) for a, b in box)].copy()
    return found


def materialize(catalogue, old, new, parts):
    """Carries ``parts`` out round by round, giving up old pieces after their round: what the ranks hold at the end."""
    held = expected(catalogue, old, len(parts))
    made = {}
    for granules in parts[0].schedule.rounds:
        for tensor, state in granules:
            one, kind = catalogue[tensor], catalogue[tensor].states[state]
            for part in parts:
                box = piece_box(one, kind, new, part.rank)
                if box is None:
                    continue
                target = np.full(shape_of(box), np.nan)
                if (tensor, state) in part.adopted:
                    target = held[part.rank, tensor, state]
                for move in (*part.receives, *part.relays):
                    if move.tensor == tensor and state in move.states:
                        source = held[move.src, tensor, state]
                        where = piece_box(one, kind, old, move.src)
                        target[within(move.box, box)] = source[within(move.box, where)]
                made[part.rank, tensor, state] = target
        for tensor, state in granules:
            for part in parts:
                held.pop((part.rank, tensor, state), None)
    return made


def brute_force_holders(tensor, state, box, ownership):
    """Ranks whose piece of a state holds all of ``box``, by looking at every rank."""
    found = []
    for rank in ownership.layout.ranks:
        piece = piece_box(tensor, state, ownership, rank)
        if piece is not None and all(c <= a and b <= d for (a, b), (c, d) in zip(box, piece, strict=True)):
            found.append(rank)
    return found if volume(box) else []
