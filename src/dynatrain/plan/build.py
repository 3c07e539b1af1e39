"""From ownership A to ownership B: the moves, for one rank or for all.

The new pieces are cut by the old grid, and each cut is fetched from the holder that the rule of
:mod:`dynatrain.plan.sources` names. A rank derives its own part alone: what it receives from its own new piece, what it
sends from its own old piece; that both ends agree follows from their asking the same rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynatrain.plan.plan import Granule, Loss, Move, RankPlan, Schedule
from dynatrain.plan.sources import Family, families
from dynatrain.plan.table import Ints, MoveTable, WholePlan
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue

Adoptable = Callable[[int], bool]
"""Whether equal boxes of tensor ``i`` may keep their storage. Must answer alike on every rank."""


def always(_tensor: int) -> bool:
    """Equal boxes lie in equal storage."""
    return True


def rank_plan(
    catalogue: Catalogue,
    old: Ownership,
    new: Ownership,
    rank: int,
    schedule: Schedule,
    *,
    ranks_per_node: int | None = None,
    adoptable: Adoptable = always,
    loss: Loss | None = None,
) -> RankPlan:
    """The part of ``rank``: sends, receives and relays in catalogue order, then by box, then by peer.

    The two layouts may have different members: ``rank`` counts in both, and holds nothing where it is not one of them.

    Args:
        catalogue: the tensors, equal on every rank.
        old: the ownership that has the state.
        new: the ownership that needs it.
        rank: whose part.
        schedule: the rounds, see :mod:`dynatrain.plan.schedule`.
        ranks_per_node: rank ``r`` is on node ``r // ranks_per_node``; None puts all ranks on one node.
        adoptable: vetoes adoption where equal boxes lie in unequal storage: such a piece is relaid.
        loss: of ranks of ``old``; None where all are there. What no memory has is in no move, but among the fetches of
            :func:`dynatrain.plan.shelves.reads_of_rest`. A keeper sends, and relays, out of its wards' pieces too.

    Raises:
        PlanError: a tensor has no owner before or after; all such are named.
    """
    sends: list[Move] = []
    receives: list[Move] = []
    relays: list[Move] = []
    adopted: list[Granule] = []
    for family in families(catalogue, old, new, ranks_per_node=ranks_per_node, loss=loss, turns=schedule.turns):
        kept = family.keeps(rank)
        incoming = tuple(cut for cut in family.incoming(rank) if cut.sources)
        for number, item in enumerate(family.items):
            if kept and adoptable(item.tensor):
                adopted.extend(item.granules)
            else:
                for cut in incoming:
                    src = cut.source(number)
                    (relays if src == rank else receives).append(Move(item.tensor, item.states, cut.box, src, rank))
        for target, cut, numbers in family.outgoing(rank):
            turns = family.items[numbers.start : numbers.stop : numbers.step]
            sends.extend(Move(item.tensor, item.states, cut.box, rank, target) for item in turns)
    return RankPlan(
        rank=rank,
        sends=tuple(sorted(sends, key=_order)),
        receives=tuple(sorted(receives, key=_order)),
        relays=tuple(sorted(relays, key=_order)),
        adopted=tuple(sorted(adopted)),
        schedule=schedule,
    )


def _order(move: Move) -> tuple[object, ...]:
    return move.tensor, move.states, move.box, move.src, move.dst


def whole_plan(
    catalogue: Catalogue,
    old: Ownership,
    new: Ownership,
    schedule: Schedule,
    *,
    ranks_per_node: int | None = None,
    adoptable: Adoptable = always,
    loss: Loss | None = None,
) -> WholePlan:
    """All ranks' parts as columns; arguments and errors as in :func:`rank_plan`, whose rule it asks.

    Cuts are found once per family and rank; the family's tensors, which differ only by turn, are filled in by numpy.
    """
    dims = max((len(tensor.shape) for tensor in catalogue), default=0)
    groups: dict[tuple[int, ...], int] = {}
    parts = []
    for family in families(catalogue, old, new, ranks_per_node=ranks_per_node, loss=loss, turns=schedule.turns):
        rows = _rows(family, new.layout.ranks, dims)
        tensor = np.array([item.tensor for item in family.items], np.int64)
        group = np.array([groups.setdefault(item.states, len(groups)) for item in family.items], np.int64)
        free = rows.kept[:, None] & np.array([adoptable(item.tensor) for item in family.items], np.bool_)
        row, number = np.nonzero(~free)
        src = rows.sources[rows.first[row] + (number + rows.turn[row]) % rows.ways[row]]
        moved = tensor[number], group[number], rows.low[row], rows.high[row], src, rows.dst[row]
        row, number = np.nonzero(free)
        parts.append((*moved, tensor[number], group[number], rows.dst[row]))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return WholePlan(
        moves=MoveTable(
            **dict(zip(("tensor", "group", "low", "high", "src", "dst"), columns[:6], strict=True)),
            groups=tuple(groups),
        ),
        adopted_tensor=columns[6],
        adopted_group=columns[7],
        adopted_rank=columns[8],
        schedule=schedule,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """All cuts of one family, one a row; ``sources[first : first + ways]`` are those of a row."""

    dst: Ints
    low: Ints
    high: Ints
    turn: Ints
    first: Ints
    ways: Ints
    sources: Ints
    kept: npt.NDArray[np.bool_]


def _rows(family: Family, ranks: Sequence[int], dims: int) -> _Rows:
    cuts = [(rank, cut) for rank in ranks for cut in family.incoming(rank) if cut.sources]
    low, high = np.zeros((len(cuts), dims), np.int64), np.ones((len(cuts), dims), np.int64)
    if cuts and cuts[0][1].box:
        bounds = np.array([cut.box for _, cut in cuts], np.int64)
        low[:, : bounds.shape[1]], high[:, : bounds.shape[1]] = bounds[:, :, 0], bounds[:, :, 1]
    ways = np.array([len(cut.sources) for _, cut in cuts], np.int64)
    return _Rows(
        dst=np.array([rank for rank, _ in cuts], np.int64),
        low=low,
        high=high,
        turn=np.array([cut.turn for _, cut in cuts], np.int64),
        first=np.cumsum(ways) - ways,
        ways=ways,
        sources=np.array([rank for _, cut in cuts for rank in cut.sources], np.int64),
        kept=np.array([family.keeps(rank) for rank, _ in cuts], np.bool_),
    )
