"""The floor on a described cluster: seconds below which no choice of sources can come, nor any order of rounds.

Each part is what one kind of link, or memory, cannot avoid. What a rank needs and does not hold, it receives; what
nobody on its node holds comes from another node, and, where nobody on its rail does, through the core. What one rank
alone holds, it sends; what several hold leaves through them together, so that the busiest has at least the mean.
"""

from collections.abc import Mapping

import numpy as np

from dynatrain.plan.table import FamilyPlan, Ints
from dynatrain.simulate.machines import Machines
from dynatrain.space.tensor import ITEMSIZE, Catalogue


def floor_parts(catalogue: Catalogue, plan: FamilyPlan, machines: Machines, ranks: int) -> Mapping[str, float]:
    """Seconds of each part; the largest is the floor.

    Args:
        catalogue: the tensors.
        plan: made with the ``ranks_per_node`` of ``machines``: it says who holds what, on which node.
        machines: the cluster.
        ranks: how many there are.
    """
    written, kept = _bytes(catalogue, plan)
    holds = (plan.ways == 1) & (plan.sources[plan.first] == plan.dst)
    relaid = np.bincount(plan.dst[holds], (written - kept * plan.kept)[holds], ranks)
    rows = np.flatnonzero(~holds & (written > 0))
    dst, size = plan.dst[rows], written[rows]
    node = machines.ranks_per_node
    far = plan.sources[plan.first[rows]] // node != dst // node
    comes, comes_far = np.bincount(dst, size, ranks), np.bincount(dst[far], size[far], ranks)
    leaves, leaves_far = _sent(plan, rows, size, ranks), _sent(plan, rows[far], size[far], ranks)
    nodes = np.arange(ranks) // node
    both = machines.near + machines.far if node > 1 else machines.far
    fabric = 1e9 * machines.fabric_gb_s or float("inf")
    crossing = ~_on_rail(plan, rows, machines) if machines.rails > 1 else np.ones(len(rows), np.bool_)
    crossing &= far
    rail = dst % node % machines.rails
    core = (nodes[-1] + 1) * machines.rail / machines.oversubscription
    wrote, share = comes + relaid, min(machines.processors or node, node)
    return {
        "receive": max(comes.max() / both, comes_far.max() / machines.far),
        "send": max(leaves / both, leaves_far / machines.far),
        "node": max(
            np.bincount(nodes, comes_far).max() / (machines.rail * machines.rails),
            np.bincount(nodes, comes).max() / (fabric + machines.rail * machines.rails),
        ),
        "core": np.bincount(rail[crossing], size[crossing], machines.rails).max() / core,
        "memory": max(wrote.max(), np.bincount(nodes, wrote).max() / share) / (1e9 * machines.copy_gb_s),
    }


def _bytes(catalogue: Catalogue, plan: FamilyPlan) -> tuple[Ints, Ints]:
    """Bytes of each row over all members of its family; and over those that may adopt."""
    total = np.zeros((2, len(plan.members)), np.int64)
    for family, of in enumerate(plan.members):
        for adopts, tensor, states in zip(of.adopts.tolist(), of.tensor.tolist(), of.states, strict=True):
            size = sum(ITEMSIZE[catalogue[tensor].states[state].dtype] for state in states)
            total[:, family] += size, size * adopts
    written, kept = total[:, plan.family] * plan.volume()
    return written, kept


def _sent(plan: FamilyPlan, rows: Ints, size: Ints, ranks: int) -> float:
    """The least bytes of the busiest sender, by sets of ranks that hold the same."""
    if not len(rows):
        return 0.0
    first, count, where = _stretches(plan, rows)
    begins = np.cumsum(count) - count
    who = plan.sources[np.repeat(first - begins, count) + np.arange(count.sum())]
    amount = np.bincount(where, size)
    alone = np.bincount(who[begins[count == 1]], amount[count == 1], ranks)
    # Sets that several families have in common are one: told apart by a sum of mixed numbers.
    mixed = np.add.reduceat(_mixed(who), begins)
    _, one, same = np.unique(mixed, return_index=True, return_inverse=True)
    together = np.bincount(same, amount)
    own = np.add.reduceat(alone[who], begins)[one]
    means = np.where(count[one] > 1, (together + own) / count[one], together)
    return float(max(means.max(), size.sum() / ranks))


def _mixed(ranks: Ints) -> Ints:
    numbers = (ranks.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(32))) * np.uint64(0xC4CEB9FE1A85EC53)
    return (numbers ^ (numbers >> np.uint64(29))).view(np.int64)


def _stretches(plan: FamilyPlan, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Where in the sources the holders of each old piece lie that ``rows`` ask for, and which is each row's."""
    _, one, where = np.unique(plan.holders_first[rows], return_index=True, return_inverse=True)
    return plan.holders_first[rows][one], plan.holders[rows][one], where


def _on_rail(plan: FamilyPlan, rows: Ints, machines: Machines) -> "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]":
    """Whether anybody on the rail of each row's target holds the old piece."""
    if not len(rows):
        return np.zeros(0, np.bool_)
    first, count, where = _stretches(plan, rows)
    begins = np.cumsum(count) - count
    who = plan.sources[np.repeat(first - begins, count) + np.arange(count.sum())]
    has = np.zeros((len(first), machines.rails), np.bool_)
    has[np.repeat(np.arange(len(first)), count), who % machines.ranks_per_node % machines.rails] = True
    return np.asarray(has[where, plan.dst[rows] % machines.ranks_per_node % machines.rails])
