"""Layouts near a given one, nearest first, legal or not: the enumeration behind "nearest legal"."""

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

from dynatrain.layout.layout import AXES, EXPERT_AXES, Layout
from dynatrain.layout.text import print_layout

Sizes = dict[str, int]

_EACH = 64
"""Sizes of one axis up to here are each tried."""


def ranked(layout: Layout, world_size: int | None) -> list[Layout]:
    """All layouts of ``world_size`` ranks in the options of ``layout`` where they still apply, and with fewer of them.

    Of cp, ep and etp only what ``layout`` has is kept or changed: who does not ask for them is not sent there.
    With a free world: those of the layout's own size, and those that change one axis alone, up to twice its size; of an
    axis of more than :data:`_EACH`, to powers of two beyond that.
    Sorted by changed axes, then by how far sizes change, then by options given up, then by text.
    """
    axes = tuple(axis for axis in AXES if axis != "cp" or layout.size("cp") > 1)
    if world_size is not None:
        candidates = list(_factorings(world_size, axes))
    else:
        own = {axis: layout.size(axis) for axis in axes}
        alone = [own | {axis: size} for axis in axes for size in _sizes(2 * own[axis])]
        candidates = [*_factorings(layout.world_size, axes), *alone]
    found = {variant for sizes in candidates for variant in _variants(layout, dict.fromkeys(AXES, 1) | sizes)}
    return sorted(found, key=lambda near: _distance(layout, near))


def _sizes(most: int) -> list[int]:
    powers = (1 << power for power in range(most.bit_length()))
    return [*range(1, min(most, _EACH) + 1), *(size for size in powers if size > _EACH)]


def _factorings(world_size: int, axes: tuple[str, ...]) -> Iterator[Sizes]:
    """Every way to write ``world_size`` as a product over ``axes``."""
    if len(axes) == 1:
        yield {axes[0]: world_size}
        return
    for size in _divisors(world_size):
        for others in _factorings(world_size // size, axes[1:]):
            yield {axes[0]: size, **others}


def _divisors(number: int) -> list[int]:
    low = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return sorted({*low, *(number // i for i in low)})


def _variants(layout: Layout, sizes: Sizes) -> Iterator[Layout]:
    """Layouts of ``sizes`` that keep as much of ``layout`` as can be kept, with and without what may be at fault."""
    world = math.prod(sizes.values())
    axes = tuple((axis, sizes[axis]) for axis in _rank_order(layout) if sizes[axis] > 1)
    staged, context, sharded = sizes["pp"] > 1, sizes["cp"] > 1, sizes["fsdp"] * sizes["cp"] > 1
    order = layout.order if layout.order and sorted(layout.order) == list(range(world)) else ()
    pipelines = {(1, ()), *_pipelines(layout, sizes["pp"])} if staged else {(1, ())}
    schedules = {layout.schedule, ""} if staged else {""}
    zeros = {layout.zero if layout.zero in {1, 2} else 3, 2 if layout.schedule else 3} if sharded else {3}
    methods = {layout.cp_method, "gather"} if context else {"gather"}
    sps = {layout.sp and sizes["tp"] > 1, False}
    experts = _experts(layout, sizes)
    for (chunks, stages), schedule, zero, method, sp, (ep, etp) in itertools.product(
        pipelines, schedules, zeros, methods, sps, experts
    ):
        yield Layout(
            axes=axes,
            chunks=chunks,
            stages=stages,
            schedule="zb" if schedule == "zbv" and chunks != 2 else schedule,
            zero=zero,
            cp_method=method,
            sp=sp,
            ep=ep,
            etp=etp,
            order=order,
        )


def _pipelines(layout: Layout, pp: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Chunks and pinned layers that may be kept with ``pp`` ranks."""
    chunks = max(layout.chunks, 1)
    yield chunks, ()
    if len(layout.stages) == pp * chunks:
        yield chunks, layout.stages


def _experts(layout: Layout, sizes: Sizes) -> set[tuple[int, int]]:
    """Sizes of ep and etp that may stand beside ``sizes``: those of ``layout``, one of the two changed, or neither."""
    inner = sizes["fsdp"] * sizes["cp"] * sizes["tp"]
    own = layout.ep, layout.etp
    found = {own, (1, 1)}
    if layout.ep > 1:
        found |= {(size, layout.etp) for size in _divisors(inner)}
    if layout.etp > 1:
        found |= {(layout.ep, size) for size in _divisors(inner)}
    return {(ep, etp) for ep, etp in found if min(ep, etp) >= 1 and inner % (ep * etp) == 0}


def _rank_order(layout: Layout) -> list[str]:
    """All axes: those of ``layout`` in its order, the others where they usually stand."""
    names = list(dict.fromkeys(name for name, _ in layout.axes if name in AXES))
    for axis in AXES:
        if axis not in names:
            later = [names.index(name) for name in AXES[AXES.index(axis) + 1 :] if name in names]
            names.insert(min(later, default=len(names)), axis)
    return names


def _distance(layout: Layout, near: Layout) -> tuple[int, Fraction, int, str]:
    ratios = [Fraction(near.size(axis), max(layout.size(axis), 1)) for axis in (*AXES, *EXPERT_AXES)]
    options = ("sp", "zero", "stages", "chunks", "schedule", "cp_method", "order")
    return (
        sum(ratio != 1 for ratio in ratios),
        math.prod((max(ratio, 1 / ratio) for ratio in ratios), start=Fraction(1)),
        sum(getattr(layout, option) != getattr(near, option) for option in options),
        print_layout(near),
    )
