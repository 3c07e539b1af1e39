"""The plan of all ranks by families, without a step in Python for each rank: for worlds of many thousands.

It asks the rule of :mod:`dynatrain.plan.sources` of all targets at once: the same divisions, as columns. What they give
depends on shapes and cuts alone, so that families which differ by stages only divide once.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynatrain.plan.build import Adoptable, always
from dynatrain.plan.mesh import Mesh
from dynatrain.plan.plan import Schedule
from dynatrain.plan.sources import Family, Grid, families
from dynatrain.plan.table import FamilyPlan, Ints, Members
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue

_COLUMNS = ("family", "low", "high", "dst", "first", "ways", "turn", "kept", "holders_first", "holders")


def family_plan(
    catalogue: Catalogue,
    old: Ownership,
    new: Ownership,
    schedule: Schedule,
    *,
    ranks_per_node: int | None = None,
    adoptable: Adoptable = always,
) -> FamilyPlan:
    """All ranks' parts; arguments and errors as in :func:`dynatrain.plan.build.rank_plan`, whose rule it asks.

    Both ownerships are declared ones: cuts take chunks, never spans.
    """
    dims = max((len(tensor.shape) for tensor in catalogue), default=0)
    old_mesh, new_ranks = Mesh(old.layout), np.array(Mesh(new.layout).ranks, np.int64)
    divided: dict[tuple[object, ...], _Pairs] = {}
    members: list[Members] = []
    parts: list[tuple[npt.NDArray[np.generic], ...]] = []
    sources: list[Ints] = []
    begin = 0
    for number, family in enumerate(families(catalogue, old, new, ranks_per_node=ranks_per_node, turns=schedule.turns)):
        key = family.old.shape, family.old.cuts, family.old.digits, family.new.cuts, family.new.digits
        if key not in divided:
            divided[key] = _divide(family.old, family.new, dims)
        columns, senders = _rows(family, divided[key], old_mesh, new_ranks, ranks_per_node)
        low, high, dst, first, ways, turn, kept, held, holders = columns
        rows = np.full(len(dst), number, np.int64)
        parts.append((rows, low, high, dst, begin + first, ways, turn, kept, begin + held, holders))
        sources.append(senders)
        begin += len(senders)
        members.append(
            Members(
                tensor=np.array([item.tensor for item in family.items], np.int64),
                states=tuple(item.states for item in family.items),
                adopts=np.array([adoptable(item.tensor) for item in family.items], np.bool_),
            )
        )
    joined = (np.concatenate(column) for column in zip(*parts, strict=True))
    return FamilyPlan(
        members=tuple(members),
        sources=np.concatenate(sources),
        schedule=schedule,
        **dict(zip(_COLUMNS, joined, strict=True)),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pairs:
    """Every new cell with every old cell that it shares elements with, one a row.

    Attributes:
        new: the digits of the new cell as a number.
        old: those of the old cell.
        cell: index of the old cell among ``bases``.
        low: of the shared box, (rows, dims).
        high: of the shared box, (rows, dims).
        same: whether both cells are one box.
        position: number of the new cell among those that meet the old one.
        meeting: how many these are.
        bases: the digits of each old cell that occurs, as a number.
    """

    new: Ints
    old: Ints
    cell: Ints
    low: Ints
    high: Ints
    same: npt.NDArray[np.bool_]
    position: Ints
    meeting: Ints
    bases: Ints


def _divide(old: Grid, new: Grid, dims: int) -> _Pairs:
    """As :meth:`Grid.meeting`, for the boxes of all new cells."""
    ways = [count for _, count in new.cuts]
    index = np.indices(ways).reshape(len(ways), -1).T if ways else np.zeros((1, 0), np.int64)
    low, high = _whole(new.shape, len(index), dims)
    for (dim, count), at in zip(new.cuts, index.T, strict=True):
        low[:, dim], high[:, dim] = _chunk(low[:, dim], high[:, dim], count, at)
    filled = (low < high).all(axis=1)
    low, high, base = low[filled], high[filled], (index @ _strides(new))[filled]
    row = np.arange(len(base))
    outer_low, outer_high = _whole(old.shape, len(base), dims)
    number = np.zeros(len(base), np.int64)
    for (dim, count), (stride, _) in zip(old.cuts, old.digits, strict=True):
        start, stop = outer_low[:, dim], outer_high[:, dim]
        size = -(-(stop - start) // count)
        first = (np.maximum(low[row, dim], start) - start) // size
        times = -(-(np.minimum(high[row, dim], stop) - start) // size) - first
        at = np.repeat(first - np.cumsum(times) + times, times) + np.arange(times.sum())
        row, number = np.repeat(row, times), np.repeat(number, times) + stride * at
        outer_low, outer_high = np.repeat(outer_low, times, axis=0), np.repeat(outer_high, times, axis=0)
        outer_low[:, dim], outer_high[:, dim] = _chunk(outer_low[:, dim], outer_high[:, dim], count, at)
    bases, cell = np.unique(number, return_inverse=True)
    order = np.lexsort((row, cell))
    meeting = np.bincount(cell)
    position = np.empty_like(order)
    position[order] = np.arange(len(order)) - np.repeat(np.cumsum(meeting) - meeting, meeting)
    return _Pairs(
        new=base[row],
        old=number,
        cell=cell,
        low=np.maximum(low[row], outer_low),
        high=np.minimum(high[row], outer_high),
        same=((low[row] == outer_low) & (high[row] == outer_high)).all(axis=1),
        position=position,
        meeting=meeting[cell],
        bases=bases,
    )


def _whole(shape: tuple[int, ...], rows: int, dims: int) -> tuple[Ints, Ints]:
    low, high = np.zeros((rows, dims), np.int64), np.ones((rows, dims), np.int64)
    high[:, : len(shape)] = shape
    return low, high


def _chunk(start: Ints, stop: Ints, ways: int, at: Ints) -> tuple[Ints, Ints]:
    """:func:`dynatrain.space.box.chunk` of columns."""
    size = -(-(stop - start) // ways)
    first = np.minimum(start + at * size, stop)
    return first, np.minimum(first + size, stop)


def _strides(grid: Grid) -> Ints:
    return np.array([stride for stride, _ in grid.digits], np.int64)


def _rows(
    family: Family, pairs: _Pairs, old: Mesh, new_ranks: Ints, ranks_per_node: int | None
) -> tuple[tuple[npt.NDArray[np.generic], ...], Ints]:
    """The columns of one family behind its number, and its sources, in which ``first`` and ``holders_first`` count."""
    offsets = np.array(family.new.offsets, np.int64)
    pair = np.repeat(np.arange(len(pairs.new)), len(offsets))
    copy = np.tile(np.arange(len(offsets)), len(pairs.new))
    dst = new_ranks[pairs.new[pair] + offsets[copy]]
    holds = _numbers(family.old, old, dst) == pairs.old[pair]
    # All holders of each old cell, then those of each by node, then the targets that need nobody.
    owners = np.array(old.ranks, np.int64)[pairs.bases[:, None] + np.array(family.old.offsets, np.int64)]
    copies = owners.shape[1]
    held = pairs.cell[pair] * copies
    first, ways, parts = held.copy(), np.full(len(dst), copies), [owners.ravel()]
    if ranks_per_node is not None and copies > 1:
        near, found, count = _near(owners, pairs.cell[pair], dst, ranks_per_node)
        first, ways = np.where(count > 0, owners.size + found, first), np.where(count > 0, count, ways)
        parts.append(near)
    number = copy * pairs.meeting[pair] + pairs.position[pair]
    turn = np.where(ways > 1, family.first + number + number // ways, 0)
    first[holds] = sum(map(len, parts)) + np.arange(holds.sum())
    ways[holds], turn[holds] = 1, 0
    parts.append(dst[holds])
    kept = holds & pairs.same[pair]
    columns = pairs.low[pair], pairs.high[pair], dst, first, ways, turn, kept, held, np.full(len(dst), copies)
    return columns, np.concatenate(parts)


def _numbers(grid: Grid, mesh: Mesh, ranks: Ints) -> Ints:
    """The digits of the old cell of each of ``ranks``, as a number; -1 outside the tensor's stages and the world."""
    known = np.array(mesh.numbers, np.int64)
    number = np.where(ranks < len(known), known[np.minimum(ranks, len(known) - 1)], -1)
    held = np.isin(number // mesh.stage_size, grid.stages)  # of nobody -1, which is in no stage
    digits = sum((number // stride % ways * stride for stride, ways in grid.digits), np.zeros_like(number))
    return np.where(held, digits, -1)


def _near(owners: Ints, cell: Ints, dst: Ints, ranks_per_node: int) -> tuple[Ints, Ints, Ints]:
    """``owners`` of each cell by node, and where in it, and how many, those on the node of each ``dst`` are."""
    nodes = owners // ranks_per_node
    order = np.argsort(nodes, axis=1, kind="stable")
    most = max(int(nodes.max()), int(dst.max()) // ranks_per_node) + 1
    key = (np.take_along_axis(nodes, order, 1) + most * np.arange(len(nodes))[:, None]).ravel()
    wanted = dst // ranks_per_node + most * cell
    found = np.searchsorted(key, wanted)
    return np.take_along_axis(owners, order, 1).ravel(), found, np.searchsorted(key, wanted, "right") - found
