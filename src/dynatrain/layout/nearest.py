"""Layouts near a given one, nearest first, legal or not: the enumeration behind "nearest legal"."""

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction

from dynatrain.layout.layout import AXES, Layout
from dynatrain.layout.text import print_layout

Sizes = dict[str, int]

_EACH = 64
"""Sizes of one axis up to here are each tried."""


def ranked(layout: Layout, world_size: int | None) -> list[Layout]:
    """All layouts of ``world_size`` ranks in the options of ``layout`` where they still apply, and without ``-sp``.

    With a free world: those of the layout's own size, and those that change one axis alone, up to twice its size; of an
    axis of more than :data:`_EACH`, to powers of two beyond that.
    Sorted by changed axes, then by how far sizes change, then by options given up, then by text.
    """
    if world_size is not None:
        candidates = list(_factorings(world_size))
    else:
        own = {axis: layout.size(axis) for axis in AXES}
        alone = [own | {axis: size} for axis in AXES for size in _sizes(2 * own[axis])]
        candidates = [*_factorings(layout.world_size), *alone]
    found = {variant for sizes in candidates for variant in _variants(layout, sizes)}
    return sorted(found, key=lambda near: _distance(layout, near))


def _sizes(most: int) -> list[int]:
    powers = (1 << power for power in range(most.bit_length()))
    return [*range(1, min(most, _EACH) + 1), *(size for size in powers if size > _EACH)]


def _factorings(world_size: int) -> Iterator[Sizes]:
    """Every way to write ``world_size`` as a product over the axes."""

    def split(rest: int, axes: tuple[str, ...]) -> Iterator[Sizes]:
        if len(axes) == 1:
            yield {axes[0]: rest}
            return
        for size in _divisors(rest):
            for others in split(rest // size, axes[1:]):
                yield {axes[0]: size, **others}

    return split(world_size, AXES)


def _divisors(number: int) -> list[int]:
    low = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return sorted({*low, *(number // i for i in low)})


def _variants(layout: Layout, sizes: Sizes) -> Iterator[Layout]:
    """Layouts of ``sizes`` that keep as much of ``layout`` as can be kept, with and without what may be at fault."""
    world = math.prod(sizes.values())
    kept = Layout(
        axes=tuple((axis, sizes[axis]) for axis in _rank_order(layout) if sizes[axis] > 1),
        stages=layout.stages if len(layout.stages) == sizes["pp"] > 1 else (),
        zero=layout.zero if sizes["fsdp"] > 1 and layout.zero in {1, 2} else 3,
        sp=layout.sp and sizes["tp"] > 1,
        order=layout.order if layout.order and sorted(layout.order) == list(range(world)) else (),
    )
    for sp in {kept.sp, False}:
        for stages in {kept.stages, ()}:
            yield dataclasses.replace(kept, sp=sp, stages=stages)


def _rank_order(layout: Layout) -> list[str]:
    """All axes: those of ``layout`` in its order, the others where they usually stand."""
    names = list(dict.fromkeys(name for name, _ in layout.axes if name in AXES))
    for axis in AXES:
        if axis not in names:
            later = [names.index(name) for name in AXES[AXES.index(axis) + 1 :] if name in names]
            names.insert(min(later, default=len(names)), axis)
    return names


def _distance(layout: Layout, near: Layout) -> tuple[int, Fraction, int, str]:
    ratios = [Fraction(near.size(axis), max(layout.size(axis), 1)) for axis in AXES]
    options = [(layout.sp, near.sp), (layout.zero, near.zero), (layout.stages, near.stages), (layout.order, near.order)]
    return (
        sum(ratio != 1 for ratio in ratios),
        math.prod((max(ratio, 1 / ratio) for ratio in ratios), start=Fraction(1)),
        sum(before != after for before, after in options),
        print_layout(near),
    )
