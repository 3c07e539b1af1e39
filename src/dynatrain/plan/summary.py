"""What a plan costs: bytes per rank and pair, peak, rounds, and the floor under every choice of source."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dynatrain.plan.schedule import predicted_peak
from dynatrain.plan.sources import families
from dynatrain.plan.storage import PieceTable, Storage
from dynatrain.plan.table import Ints, MoveTable, WholePlan
from dynatrain.space.box import volume
from dynatrain.space.ownership import Ownership, num_holders
from dynatrain.space.tensor import ITEMSIZE, Catalogue

PAIRS_UP_TO = 64
"""Largest world whose ledger per ordered pair is kept in a summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """A plan in numbers; bytes everywhere, per rank where a tuple.

    Attributes:
        mode: ``keep`` or ``tight``.
        rounds: rounds of the schedule.
        bytes_in: received from other ranks.
        bytes_out: sent to other ranks.
        relaid: kept, but written anew.
        adopted: kept where it lies.
        pairs: ``(src, dst)`` -> bytes between two ranks; empty above :data:`PAIRS_UP_TO` ranks.
        peak: most bytes of pieces held at one time.
        floor_link: no choice of sources lets the busiest rank's link carry less, one way.
        floor_wire: no choice of sources lets the ranks of the busiest machine receive less from other ranks.
        floor_machine: no choice of sources lets the busiest machine write less: moved in, or relaid.
    """

    mode: str
    rounds: int
    bytes_in: tuple[int, ...]
    bytes_out: tuple[int, ...]
    relaid: tuple[int, ...]
    adopted: tuple[int, ...]
    pairs: Mapping[tuple[int, int], int]
    peak: tuple[int, ...]
    floor_link: int
    floor_wire: int
    floor_machine: int

    @property
    def moved(self) -> int:
        """Bytes that change ranks."""
        return sum(self.bytes_in)


def summarise(
    catalogue: Catalogue,
    old: Ownership,
    new: Ownership,
    plan: WholePlan,
    storage: Storage,
    *,
    ranks_per_node: int | None = None,
) -> PlanSummary:
    """The numbers of ``plan``, which takes ``old`` to ``new``.

    Args:
        catalogue: the tensors.
        old: the ownership that has the state.
        new: the ownership that needs it.
        plan: all ranks' parts.
        storage: bytes of the same switch, for the peak.
        ranks_per_node: rank ``r`` writes on machine ``r // ranks_per_node``; None puts all ranks on one machine.
    """
    ranks = num_holders(old, new)
    moves, sizes = plan.moves, move_bytes(catalogue, plan.moves)
    away = moves.src != moves.dst
    bytes_in = _per_rank(moves.dst[away], sizes[away], ranks)
    relaid = _per_rank(moves.dst[~away], sizes[~away], ranks)
    adopted = _adopted(catalogue, new, plan, ranks)
    machine = np.arange(ranks) // (ranks_per_node or ranks)
    return PlanSummary(
        mode=plan.schedule.mode,
        rounds=len(plan.schedule.rounds),
        bytes_in=tuple(bytes_in.tolist()),
        bytes_out=tuple(_per_rank(moves.src[away], sizes[away], ranks).tolist()),
        relaid=tuple(relaid.tolist()),
        adopted=tuple(adopted.tolist()),
        pairs=ledger(catalogue, moves) if ranks <= PAIRS_UP_TO else {},
        peak=tuple(predicted_peak(storage, plan.schedule).tolist()),
        floor_link=_floor_link(catalogue, old, new),
        floor_wire=int(np.bincount(machine, bytes_in).max()),
        floor_machine=int(np.bincount(machine, bytes_in + relaid).max()),
    )


def floor_seconds(
    summary: PlanSummary,
    *,
    link_bytes_per_second: float,
    wire_bytes_per_second: float,
    copy_bytes_per_second: float,
) -> float:
    """The least seconds of the move at given rates.

    Args:
        summary: of the plan.
        link_bytes_per_second: of one rank's link, one way, while all others are idle.
        wire_bytes_per_second: of all links of one machine together; less than their sum where they share processors.
        copy_bytes_per_second: of one machine's memory writes.
    """
    return max(
        summary.floor_link / link_bytes_per_second,
        summary.floor_wire / wire_bytes_per_second,
        summary.floor_machine / copy_bytes_per_second,
    )


def move_bytes(catalogue: Catalogue, moves: MoveTable) -> Ints:
    """Bytes of each move, all its states together."""
    return moves.volume * _element_bytes(catalogue, moves.groups)[moves.tensor, moves.group]


def ledger(catalogue: Catalogue, moves: MoveTable) -> dict[tuple[int, int], int]:
    """``(src, dst)`` -> bytes, over all pairs of different ranks that exchange any, in order of pairs."""
    sizes = move_bytes(catalogue, moves)
    away = np.flatnonzero(moves.src != moves.dst)
    pairs, where = np.unique(np.stack([moves.src[away], moves.dst[away]]), axis=1, return_inverse=True)
    total = np.zeros(pairs.shape[1], np.int64)
    np.add.at(total, where, sizes[away])
    return {(int(src), int(dst)): int(size) for src, dst, size in zip(*pairs, total, strict=True)}


def _element_bytes(catalogue: Catalogue, groups: tuple[tuple[int, ...], ...]) -> Ints:
    """Bytes that one element takes in all states of a group, (tensors, groups); 0 where a tensor lacks a state."""
    sizes = [[ITEMSIZE[state.dtype] for state in tensor.states] for tensor in catalogue]
    return np.array(
        [[sum(of[state] for state in group) if group[-1] < len(of) else 0 for group in groups] for of in sizes],
        np.int64,
    ).reshape(len(sizes), len(groups))


def _per_rank(rank: Ints, size: Ints, ranks: int) -> Ints:
    total = np.zeros(ranks, np.int64)
    np.add.at(total, rank, size)
    return total


def _adopted(catalogue: Catalogue, new: Ownership, plan: WholePlan, ranks: int) -> Ints:
    """Bytes of the adopted pieces of each rank, without padding."""
    pieces = PieceTable(new, ranks)
    element = _element_bytes(catalogue, plan.moves.groups)
    total = np.zeros(ranks, np.int64)
    for tensor, group in set(zip(plan.adopted_tensor.tolist(), plan.adopted_group.tolist(), strict=True)):
        rows = (plan.adopted_tensor == tensor) & (plan.adopted_group == group)
        one = catalogue[tensor]
        state = one.states[plan.moves.groups[group][0]]
        held = pieces.pieces(one.state_shape(state), new.placed(one, state)).elements()
        total[plan.adopted_rank[rows]] += held[plan.adopted_rank[rows]] * element[tensor, group]
    return total


def _floor_link(catalogue: Catalogue, old: Ownership, new: Ownership) -> int:
    """The busiest link under the best choice of sources, bounded from below.

    What a rank needs and does not hold must come in. What only one rank holds, that rank must send; what several hold
    goes out through them together, so that the busiest of them carries at least the mean.
    """
    comes_in: Counter[int] = Counter()
    goes_out: Counter[tuple[int, ...]] = Counter()
    for family in families(catalogue, old, new):
        size = sum(ITEMSIZE[catalogue[i.tensor].states[state].dtype] for i in family.items for state in i.states)
        for target in new.layout.ranks:
            for cut in family.incoming(target):
                if cut.sources != (target,):
                    comes_in[target] += volume(cut.box) * size
                    goes_out[cut.sources] += volume(cut.box) * size
    together: Counter[tuple[int, ...]] = Counter()
    for holders, size in goes_out.items():
        together[tuple(sorted(holders))] += size
    means = (
        math.ceil((size + (len(holders) > 1) * sum(together[holder,] for holder in holders)) / len(holders))
        for holders, size in together.copy().items()
    )
    overall = math.ceil(sum(comes_in.values()) / old.layout.world_size)
    return max([*comes_in.values(), *means, overall], default=0)
