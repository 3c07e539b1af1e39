"""Whose turn it is first, family by family, where the plain count of turns makes one rank send too much.

Holders of one cell take turns through a family's tensors and on through the next family: they send equally often, not
equally much. Where a sender is then busier than any receiver, another beginning of some families' turns spreads the
bytes better. It is found once, by whoever announces a switch, in whole numbers alone, and goes along with the rounds.
"""

from dataclasses import replace
from math import lcm

import numpy as np

from dynatrain.plan.by_family import family_plan
from dynatrain.plan.plan import Schedule
from dynatrain.plan.table import FamilyPlan, Ints
from dynatrain.space.ownership import Ownership, num_holders
from dynatrain.space.tensor import ITEMSIZE, Catalogue

_MOST_WAYS = 64
"""Holders beyond which a family is left as it is: it has far more of them than tensors, or is small."""


def with_turns(
    catalogue: Catalogue, old: Ownership, new: Ownership, schedule: Schedule, *, ranks_per_node: int | None = None
) -> Schedule:
    """``schedule`` with the turns that make the busiest sender least busy; as it is where that is no gain.

    Args:
        catalogue: the tensors.
        old: the ownership that has the state.
        new: the ownership that needs it.
        schedule: the rounds.
        ranks_per_node: as for the plan.
    """
    if any(placement.spans for side in (old, new) for placement in side.placements.values()):
        return schedule  # segments of fused tensors: not planned by families
    plan = family_plan(catalogue, old, new, replace(schedule, turns=()), ranks_per_node=ranks_per_node)
    ranks = num_holders(old, new)
    loads = [_loads(catalogue, plan, family, ranks) for family in range(len(plan.members))]
    received = sum(
        (_received(catalogue, plan, family, ranks) for family in range(len(loads))), np.zeros(ranks, np.int64)
    )
    plain = sum((shifts[0] for shifts in loads), np.zeros(ranks, np.int64))
    if plain.max() <= received.max():
        return schedule
    # The largest first, each to where it adds least to the busiest, then to the squares of all.
    order = sorted(range(len(loads)), key=lambda family: (-int(loads[family][0].sum()), family))
    scale = max(0, int(plain.sum()).bit_length() - 24)
    total, shifts = np.zeros(ranks, np.int64), [0] * len(loads)
    for family in order:
        after = total + loads[family]
        squares = ((after >> scale) ** 2).sum(axis=1)
        shifts[family] = min(range(len(after)), key=lambda at: (int(after[at].max()), int(squares[at]), at))
        total = after[shifts[family]]
    if total.max() >= plain.max():
        return schedule
    members = np.array([len(of.tensor) for of in plan.members])
    return replace(schedule, turns=tuple((np.cumsum(members) - members + shifts).tolist()))


def _loads(catalogue: Catalogue, plan: FamilyPlan, family: int, ranks: int) -> Ints:
    """Bytes that each rank sends of a family, a row for each number by which its turns may be moved on."""
    rows, size = plan.rows(family), _sizes(catalogue, plan, family)
    volume = plan.volume(rows)
    rounds = lcm(*np.unique(plan.ways[rows]).tolist())
    if rounds > _MOST_WAYS:
        rounds = 1
    numbers = np.arange(len(size) if rounds == 1 else rounds)
    src, dst = plan.source(rows, numbers), plan.dst[rows]
    away = src != dst[:, None]
    if rounds == 1:
        return _sums(src[away], (volume[:, None] * size)[away], ranks)[None]
    each = np.stack([_sums(src[of, at], volume[of], ranks) for at, of in enumerate(away.T)])
    shifted = (np.arange(rounds)[:, None] + np.arange(len(size))) % rounds
    weights = np.stack([_sums(row, size, rounds) for row in shifted])
    return np.asarray(weights @ each, np.int64)


def _received(catalogue: Catalogue, plan: FamilyPlan, family: int, ranks: int) -> Ints:
    rows = plan.rows(family)
    away = (plan.ways[rows] > 1) | (plan.sources[plan.first[rows]] != plan.dst[rows])
    size = int(_sizes(catalogue, plan, family).sum())
    return _sums(plan.dst[rows][away], plan.volume(rows)[away] * size, ranks)


def _sizes(catalogue: Catalogue, plan: FamilyPlan, family: int) -> Ints:
    """Bytes of one element of each member, all its states together."""
    of = plan.members[family]
    pairs = zip(of.tensor.tolist(), of.states, strict=True)
    return np.array([sum(ITEMSIZE[catalogue[i].states[at].dtype] for at in states) for i, states in pairs], np.int64)


def _sums(where: Ints, what: Ints, size: int) -> Ints:
    return np.bincount(where, what, size).astype(np.int64)  # exact: far fewer bytes than 2**53
