"""Worlds that lose ranks, and their recovery carried out on arrays in a way that a reader believes at sight.

Every element of every state is a number that says which it is and of which step, so that a stale one shows.
"""

import numpy as np
from tests.plans.materialize import stamps

from dynatrain.plan.keepers import kept_boxes
from dynatrain.plan.plan import Kept, Loss
from dynatrain.space.box import intersect, shape_of, volume, within

OF_STEP = 1 << 40
"""What a step adds to every element."""


def memory(world, now, keeper=(), snapshots=()):
    """What a world's ranks have: live pieces of step ``now``, and each snapshot whole, with its keepers."""
    found = [Kept(holder=rank, owner=rank, step=now, live=True) for rank in range(world)]
    for step in snapshots:
        found += [Kept(holder=rank, owner=rank, step=step) for rank in range(world)]
        found += [Kept(holder=to, owner=rank, step=step) for rank, to in enumerate(keeper) if to is not None]
    return found


def boxes_of(catalogue, old, one):
    """``granule -> box`` of what is kept."""
    if one.owner != one.holder:
        return kept_boxes(catalogue, old, one.owner)
    return {
        (index, at): box
        for index, tensor in enumerate(catalogue)
        for at, state in enumerate(tensor.states)
        if (box := old.state_box(tensor, state, one.owner)) is not None and volume(box)
    }


def newest_by_hand(catalogue, old, lost, kept, files=()):
    """The newest step of which every element is in a survivor's memory or in files, element by element; or None."""
    for step in sorted({one.step for one in kept} | {*files}, reverse=True):
        there = {granule: np.zeros(value.shape, bool) for granule, value in stamps(catalogue).items()}
        for one in kept:
            if one.step == step and one.complete and one.holder not in lost:
                for granule, box in boxes_of(catalogue, old, one).items():
                    there[granule][tuple(slice(*ends) for ends in box)] = True
        if step in files or all(value.all() for value in there.values()):
            return step
    return None


def recovered(catalogue, old, new, parts, loss: Loss, fetches=None, shelf=None):
    """Carries a recovery out: ``(rank, tensor, state)`` -> what the ranks of ``new`` then hold, NaN where nothing came.

    A sender takes each box from whatever it has that contains it, of the loss's step if it can, else the newest.
    """
    whole = stamps(catalogue)
    there = [one for one in loss.kept if one.holder not in loss.lost and one.complete]
    boxes = {one: boxes_of(catalogue, old, one) for one in there}

    def has(rank, granule, box):
        mine = [one for one in there if one.holder == rank]
        for one in sorted(mine, key=lambda one: (one.step == loss.step, one.step), reverse=True):
            piece = boxes[one].get(granule)
            if piece is not None and intersect(piece, box) == box:
                return whole[granule][tuple(slice(*ends) for ends in box)] + one.step * OF_STEP
        raise AssertionError(f"rank {rank} has no {granule} {box}")

    made = {}
    for part in parts:
        for index, tensor in enumerate(catalogue):
            for at, state in enumerate(tensor.states):
                box = new.state_box(tensor, state, part.rank)
                if box is not None:
                    made[part.rank, index, at] = np.full(shape_of(box), np.nan)
                    if (index, at) in part.adopted:
                        live = [one for one in loss.kept if one.holder == part.rank and one.live]
                        made[part.rank, index, at] = has(part.rank, (index, at), box) * bool(live)
        for move in (*part.receives, *part.relays):
            for at in move.states:
                box = new.state_box(catalogue[move.tensor], catalogue[move.tensor].states[at], part.rank)
                made[part.rank, move.tensor, at][within(move.box, box)] = has(move.src, (move.tensor, at), move.box)
        for fetch in (fetches or {}).get(part.rank, ()):
            index, at = fetch.granule
            box = new.state_box(catalogue[index], catalogue[index].states[at], part.rank)
            value = whole[fetch.granule][tuple(slice(*ends) for ends in fetch.box)] + loss.files * OF_STEP
            assert intersect(shelf[fetch.granule][fetch.place], fetch.box) == fetch.box
            made[part.rank, index, at][within(fetch.box, box)] = value
    return made


def right(catalogue, new, step):
    """What :func:`recovered` has to give."""
    whole = stamps(catalogue)
    return {
        (rank, index, at): whole[index, at][tuple(slice(*ends) for ends in box)] + step * OF_STEP
        for rank in new.layout.ranks
        for index, tensor in enumerate(catalogue)
        for at, state in enumerate(tensor.states)
        if (box := new.state_box(tensor, state, rank)) is not None
    }
