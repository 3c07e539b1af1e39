"""Copies made equal before a switch: what copy 0 holds, sent to the copies that differ from it."""

from collections.abc import Sequence

from dynatrain.plan.plan import Granule, Move, RankPlan, Schedule
from dynatrain.space.box import volume
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue


def mend_plan(
    catalogue: Catalogue, ownership: Ownership, rank: int, unequal: Sequence[tuple[Granule, int]]
) -> RankPlan:
    """The part of ``rank``, one round: each piece of an unequal copy is written anew, from that of copy 0.

    Args:
        catalogue: the tensors.
        ownership: the one under which copies differ, before and after.
        rank: whose part.
        unequal: ``(granule, copy)`` of the copies that differ from copy 0.
    """
    moves = []
    for (index, at), copy in unequal:
        tensor, state = catalogue[index], catalogue[index].states[at]
        owners = {}
        for holder in ownership.layout.ranks:
            box = ownership.state_box(tensor, state, holder)
            if box is not None and volume(box):
                owners[ownership.copy_index(tensor, holder, state), box] = holder
        moves += [
            Move(index, (at,), box, owners[0, box], holder) for (which, box), holder in owners.items() if which == copy
        ]
    return RankPlan(
        rank=rank,
        sends=tuple(move for move in moves if move.src == rank),
        receives=tuple(move for move in moves if move.dst == rank),
        relays=(),
        adopted=(),
        schedule=Schedule(rounds=(tuple(dict.fromkeys(granule for granule, _ in unequal)),), mode="keep"),
    )
