"""Who holds the same box of a state as a rank does, and which of them told something else of it.

Ranks tell one hash for all that they hold together with the same others, so what they tell does not grow with the
model; only where such hashes differ do they tell one for each state.
"""

from collections.abc import Mapping, Sequence

from dynatrain.plan.plan import Granule
from dynatrain.space.box import Box, volume
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue

_SHOWN = 4
"""States that differ and are named; the rest is counted."""


def peers(catalogue: Catalogue, owner: Ownership, rank: int) -> dict[Granule, str]:
    """Of each state of which others hold the same box as ``rank``: who does, itself too, as text (``0,2``)."""
    known: dict[object, dict[Box, list[int]]] = {}
    found = {}
    for index, tensor in enumerate(catalogue):
        for number, state in enumerate(tensor.states):
            mine = owner.state_box(tensor, state, rank)
            if mine is None or not volume(mine):
                continue
            key = state.form, tensor.shape, owner.placements[tensor.name]
            if key not in known:  # tensors of equal shape and placement, as in every layer, have the same
                known[key] = {}
                for other in owner.layout.ranks:
                    if (box := owner.state_box(tensor, state, other)) is not None:
                        known[key].setdefault(box, []).append(other)
            if len(known[key][mine]) > 1:
                found[index, number] = ",".join(map(str, known[key][mine]))
    return found


def unlike(told: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """The groups of ranks, as :func:`peers` says them, whose members told different hashes.

    Args:
        told: by rank, of each group that it is in.
    """
    groups = dict.fromkeys(who for of_rank in told for who in of_rank)
    return tuple(who for who in groups if len({told[rank].get(who) for rank in _ranks(who)}) > 1)


def named(told: Sequence[Mapping[str, Mapping[str, str]]]) -> str:
    """Which states differ, and on whom, for people.

    Args:
        told: by rank, of each group of :func:`unlike` that it is in, the hash of each state.
    """
    words = []
    for who in dict.fromkeys(who for of_rank in told for who in of_rank):
        first, *others = _ranks(who)
        for state, hashed in told[first][who].items():
            if differ := [rank for rank in others if told[rank].get(who, {}).get(state) != hashed]:
                words.append(f"{state} is not equal in all copies: ranks {differ} differ from rank {first}")
    more = [f"{len(words) - _SHOWN} more states"] if len(words) > _SHOWN else []
    return "; ".join(words[:_SHOWN] + more)


def _ranks(who: str) -> list[int]:
    return [int(rank) for rank in who.split(",")]
