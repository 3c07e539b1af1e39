"""A layout: how many ways each axis splits the job, in which rank order, and with which options.

A layout is a value. It knows nothing of a model: what a model allows is in :mod:`dynatrain.layout.legality`.

The mesh of every layout has the same axes, :data:`AXES`, in the same order; axes of size 1 stay in the mesh. What
differs between layouts is where a rank sits in it: ``axes`` lists the axes in rank order (outermost first), and
``order`` may permute the ranks on top.
"""

import math
from dataclasses import dataclass

AXES = ("pp", "dp", "fsdp", "tp")
"""All mesh axes, outermost first in the usual rank order."""

MOST_RANKS = 1 << 16
"""Ranks of the largest layout: more than anybody has trained on, and few enough to count what is near it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """Where one rank sits: its index along each axis."""

    pp: int = 0
    dp: int = 0
    fsdp: int = 0
    tp: int = 0

    def along(self, axis: str) -> int:
        """The index along one axis of :data:`AXES`."""
        return int(getattr(self, axis))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Sizes and options of all axes, and the rank order.

    Attributes:
        axes: ``(axis, size)`` in rank order, outermost first; only sizes above 1. Empty for one rank.
        stages: layers per pipeline stage where the text pins them, first stage first; empty for the default split.
        zero: 3 (parameters gathered per use), 2 (stay gathered until after backward) or 1 (gathered once a step).
        sp: sequence parallel on the tp axis.
        order: ``order[i]`` is the rank at place ``i`` of the row-major walk over ``axes``; empty for the identity.
    """

    axes: tuple[tuple[str, int], ...] = ()
    stages: tuple[int, ...] = ()
    zero: int = 3
    sp: bool = False
    order: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Ways of one axis; 1 where the layout does not name it."""
        return next((size for name, size in self.axes if name == axis), 1)

    @property
    def data_ranks(self) -> int:
        """Number of ranks that see different samples: dp x fsdp."""
        return self.size("dp") * self.size("fsdp")

    def coordinates(self, rank: int) -> Coordinates:
        """Where ``rank`` sits in the mesh."""
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

    def strides(self) -> dict[str, int]:
        """Distance, in places of the row-major walk, between neighbours along each axis (0 for size 1)."""
        found = dict.fromkeys(AXES, 0)
        step = 1
        for name, size in reversed(self.axes):
            found[name] = step
            step *= size
        return found
