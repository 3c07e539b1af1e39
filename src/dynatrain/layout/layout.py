"""A layout: how many ways each axis splits the job, in which rank order, and with which options.

A layout is a value. It knows nothing of a model: what a model allows is in :mod:`dynatrain.layout.legality`.

``axes`` lists the axes of ranks in rank order (outermost first), and ``order`` may permute the ranks on top. Whatever
that order is, each rank has one *number*: its indices along :data:`AXES`, read as the digits of a number, pp first.
Every axis that places state is then a *digit* of the number, ``number // stride % ways``, in one of two readings of the
ranks of a stage::

    dp . fsdp x cp . tp             parameters: fsdp and cp together are one axis, as each shards what all of it holds
    dp . efsdp     . ep . etp       experts: the same ranks of fsdp x cp x tp, factored anew

So a cut, its copies and its groups follow from strides and ways alone, for any axis.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

AXES = ("pp", "dp", "fsdp", "cp", "tp")
"""All axes of ranks, outermost first in the usual rank order."""

EXPERT_AXES = ("ep", "etp")
"""Axes that factor the ranks of fsdp x cp x tp anew, for experts; what is left of these ranks is ``efsdp``."""

MESH_AXES = ("pp", "dp", "fsdp", "tp")
"""Axes of the mesh that parameters live on: ``fsdp`` stands for fsdp x cp there, as in every cut."""

EXPERT_MESH_AXES = ("pp", "dp", "efsdp", "ep", "etp")
"""Axes of the mesh that experts live on: the same ranks."""

SHARD_AXES = ("dp", "fsdp", "tp", "efsdp", "ep", "etp")
"""Axes that may cut a tensor: the first three an ordinary one, ``dp`` and the last three the experts'."""

MOST_RANKS = 1 << 16
"""Ranks of the largest layout: more than anybody has trained on, and few enough to count what is near it."""

Axes = tuple[tuple[str, int], ...]
"""``(axis, size)``, outermost first."""

Digit = tuple[int, int]
"""``(stride, ways)``: the index of a rank along an axis is ``number // stride % ways``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """Where one rank sits: its index along each axis. Indices among experts are :meth:`Layout.index`'s to tell."""

    pp: int = 0
    dp: int = 0
    fsdp: int = 0
    cp: int = 0
    tp: int = 0

    def along(self, axis: str) -> int:
        """The index along one axis of :data:`AXES`."""
        return int(getattr(self, axis))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Sizes and options of all axes, and the rank order.

    Attributes:
        axes: ``(axis, size)`` in rank order, outermost first; only sizes above 1. Empty for one rank.
        chunks: stages of each pp rank, interleaved: stage s of pp x chunks is on pp rank s % pp (but see ``schedule``).
        stages: layers per stage where the text pins them, first stage first; empty for the default split.
        schedule: of the pipeline: ``zb`` (zero bubble, interleaved), ``zbv`` (zero bubble with stages laid as a V:
            stage s of 2 pp is on pp rank min(s, 2 pp - 1 - s)), or empty where the run's own schedule holds.
        zero: 3 (parameters gathered per use), 2 (stay gathered until after backward) or 1 (gathered once a step).
        cp_method: how cp ranks attend to each other's tokens: ``gather`` (keys and values gathered), ``ring`` (passed
            round) or ``ulysses`` (heads exchanged for tokens).
        sp: sequence parallel on the tp axis.
        ep: ways in which experts are dealt out.
        etp: ways in which each expert's matrices are cut.
        order: ``order[i]`` is the rank at place ``i`` of the row-major walk over ``axes``; empty for the identity. Of
            a layout that :meth:`over` has made, the holder at that place: then numbers may be missing.
    """

    axes: Axes = ()
    chunks: int = 1
    stages: tuple[int, ...] = ()
    schedule: str = ""
    zero: int = 3
    cp_method: str = "gather"
    sp: bool = False
    ep: int = 1
    etp: int = 1
    order: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    @property
    def ranks(self) -> Sequence[int]:
        """Who has a place, ascending: the ranks, or of a layout that :meth:`over` has made the holders."""
        return sorted(self.order) if self.order else range(self.world_size)

    def over(self, members: Sequence[int] | Mapping[int, int]) -> "Layout":
        """The layout with every rank called by its number among the holders of a crossing; a value for plans alone.

        Two worlds with other members are planned for in one numbering of everybody. Text has no spelling for it, and no
        configuration takes it.

        Args:
            members: ``members[rank]`` is the number of that rank; each once, not necessarily ascending. The way back
                is the mapping from numbers to ranks.
        """
        order = tuple(members[rank] for rank in self.order or range(self.world_size))
        return replace(self, order=() if order == tuple(range(self.world_size)) else order)

    def size(self, axis: str) -> int:
        """Size of one axis of :data:`AXES` or :data:`EXPERT_AXES`; 1 where the layout does not name it."""
        if axis in EXPERT_AXES:
            return int(getattr(self, axis))
        return next((size for name, size in self.axes if name == axis), 1)

    @property
    def data_ranks(self) -> int:
        """Number of ranks that see different samples: dp x fsdp."""
        return self.size("dp") * self.size("fsdp")

    @property
    def inner_ranks(self) -> int:
        """Ranks that experts are spread over within a replica: fsdp x cp x tp."""
        return self.size("fsdp") * self.size("cp") * self.size("tp")

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, over all pp ranks."""
        return self.size("pp") * self.chunks

    def coordinates(self, rank: int) -> Coordinates:
        """Where ``rank``, one of :attr:`ranks`, sits."""
        place = self.order.index(rank) if self.order else rank
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            place, found[name] = divmod(place, size)
        return Coordinates(**found)

    def rank_at(self, at: Coordinates) -> int:
        """The rank that sits at ``at``: the inverse of :meth:`coordinates`."""
        place = 0
        for name, size in self.axes:
            place = place * size + at.along(name)
        return self.order[place] if self.order else place

    def number(self, rank: int) -> int | None:
        """The number of ``rank``: what every axis is a digit of. None where ``rank`` is not one of :attr:`ranks`."""
        place = _places(self.order).get(rank) if self.order else rank
        if place is None or place >= self.world_size:
            return None
        return sum(place // walk % size * stride for walk, size, stride in _strides(self.axes))

    def rank_of(self, number: int) -> int:
        """The rank of ``number``: the inverse of :meth:`number`."""
        place = sum(number // stride % size * walk for walk, size, stride in _strides(self.axes))
        return self.order[place] if self.order else place

    def digit(self, axis: str) -> Digit:
        """Stride and ways of one axis in the numbers of ranks.

        Args:
            axis: ``pp``, ``cp``, or one of :data:`SHARD_AXES`, where ``fsdp`` stands for fsdp x cp. A number behind the
                name (``tp8``) is the most ways: what has 8 parts is cut 8 ways also by 16 ranks, of which neighbours
                hold copies. It must divide the axis, or be no less than it.

        Raises:
            ValueError: for another name, or a number that does neither.
        """
        return _digit(self.axes, self.ep, self.etp, axis)

    def ways(self, axis: str) -> int:
        """In how many parts ``axis``, as :meth:`digit` takes it, cuts a tensor."""
        return self.digit(axis)[1]

    def index(self, axis: str, rank: int) -> int:
        """The index of ``rank``, one of :attr:`ranks`, along ``axis``, as :meth:`digit` takes it."""
        stride, ways = self.digit(axis)
        number = self.number(rank)
        assert number is not None
        return number // stride % ways

    def left_over(self, axes: Iterable[str]) -> tuple[Digit, ...]:
        """The digits of a stage's ranks that none of ``axes`` reads, outermost first: along them lie copies.

        Raises:
            ValueError: two of ``axes`` share ranks (``fsdp`` and ``ep``).
        """
        return _left_over(self.axes, self.ep, self.etp, tuple(axes))


def name_of(axis: str) -> str:
    """The name in a cut's axis, without the number of most ways."""
    return axis.rstrip("0123456789")


@lru_cache(maxsize=64)
def _places(order: tuple[int, ...]) -> dict[int, int]:
    """The place of each rank."""
    return {rank: place for place, rank in enumerate(order)}


@lru_cache(maxsize=1024)
def _strides(axes: Axes) -> tuple[tuple[int, int, int], ...]:
    """Of each axis: its stride in the row-major walk over ``axes``, its size, and its stride in numbers."""
    sizes = dict(axes)
    found, walk = [], 1
    for name, size in reversed(axes):
        inner = AXES[AXES.index(name) + 1 :]
        found.append((walk, size, math.prod(sizes.get(axis, 1) for axis in inner)))
        walk *= size
    return tuple(found)


@lru_cache(maxsize=4096)
def _digit(axes: Axes, ep: int, etp: int, axis: str) -> Digit:
    sizes = dict.fromkeys(AXES, 1) | dict(axes)
    dp, fsdp, cp, tp = (sizes[name] for name in AXES[1:])
    name, most = name_of(axis), axis[len(name_of(axis)) :]
    inner = fsdp * cp * tp
    digits = {
        "pp": (inner * dp, sizes["pp"]),
        "dp": (inner, dp),
        "fsdp": (tp, fsdp * cp),
        "cp": (tp, cp),
        "tp": (1, tp),
        "efsdp": (ep * etp, inner // (ep * etp)),
        "ep": (etp, ep),
        "etp": (1, etp),
    }
    if name not in digits:
        raise ValueError(f"{axis} is no axis that places state; these are {', '.join(digits)}")
    stride, ways = digits[name]
    parts = min(int(most or ways), ways)
    if parts < 1 or ways % parts:
        raise ValueError(f"{axis}: {name}{ways} does not deal out {most} parts evenly")
    return stride * (ways // parts), parts


@lru_cache(maxsize=4096)
def _left_over(axes: Axes, ep: int, etp: int, cut: tuple[str, ...]) -> tuple[Digit, ...]:
    end = _digit(axes, ep, etp, "pp")[0]
    found, at = [], 1
    read = sorted(digit for axis in cut if (digit := _digit(axes, ep, etp, axis))[1] > 1)
    for stride, ways in (*read, (end, 1)):
        if stride % at:
            raise ValueError(f"{', '.join(cut)} cut over ranks that they share")
        if stride > at:
            found.append((at, stride // at))
        at = stride * ways
    return tuple(reversed(found))
