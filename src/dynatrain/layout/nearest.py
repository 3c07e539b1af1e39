"""Layouts near a given one, nearest first, legal or not: the enumeration behind "nearest legal"."""

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

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
    """Layouts of ``sizes`` that keep as much of ``layout`` as can be kept: all of it, all but one thing, and the least.

    The least is legal wherever any options are, so that it is enough to try no other combination.
    """
    kept = _kept(layout, sizes)
    plain: dict[str, Any] = {"sp": False, "stages": (), "schedule": "", "cp_method": "gather"}
    without: list[dict[str, Any]] = [{name: value} for name, value in plain.items()]
    without.append({"chunks": 1, "stages": (), "schedule": "zb" if kept.schedule == "zbv" else kept.schedule})
    if kept.schedule and kept.size("fsdp") * kept.size("cp") > 1:
        without.append({"zero": 2})
    without += [{"ep": ep, "etp": etp} for ep, etp in _experts(layout, kept)]
    without.append({**plain, "chunks": 1, "ep": 1, "etp": 1})
    yield kept
    for less in without:
        if any(getattr(kept, name) != value for name, value in less.items()):
            yield dataclasses.replace(kept, **less)


def _kept(layout: Layout, sizes: Sizes) -> Layout:
    """``layout`` with other sizes, and of its options those that may stand beside them."""
    world = math.prod(sizes.values())
    staged, context, sharded = sizes["pp"] > 1, sizes["cp"] > 1, sizes["fsdp"] * sizes["cp"] > 1
    chunks = max(layout.chunks, 1) if staged else 1
    ways, inner = layout.ep * layout.etp, sizes["fsdp"] * sizes["cp"] * sizes["tp"]
    fit = ways > 0 and inner % ways == 0
    return Layout(
        axes=tuple((axis, sizes[axis]) for axis in _rank_order(layout) if sizes[axis] > 1),
        chunks=chunks,
        stages=layout.stages if staged and len(layout.stages) == sizes["pp"] * chunks else (),
        schedule=layout.schedule if staged else "",
        zero=layout.zero if sharded and layout.zero in {1, 2} else 3,
        cp_method=layout.cp_method if context else "gather",
        sp=layout.sp and sizes["tp"] > 1,
        ep=layout.ep if fit else 1,
        etp=layout.etp if fit else 1,
        order=layout.order if layout.order and sorted(layout.order) == list(range(world)) else (),
    )


def _experts(layout: Layout, kept: Layout) -> list[tuple[int, int]]:
    """Other sizes of ep, or of etp, on the same ranks: only beside axes that stay, where they are the nearest."""
    if layout.ep == layout.etp == 1:
        return []
    if any(kept.size(axis) != layout.size(axis) for axis in AXES):
        return [(1, 1)]
    inner = kept.inner_ranks
    found = [(1, 1), *((ep, layout.etp) for ep in _divisors(inner)), *((layout.ep, etp) for etp in _divisors(inner))]
    return [(ep, etp) for ep, etp in found if min(ep, etp) > 0 and inner % (ep * etp) == 0]


def _rank_order(layout: Layout) -> list[str]:
    """All axes: those of ``layout`` in its order, the others where they usually stand."""
    names = list(dict.fromkeys(name for name, _ in layout.axes if name in AXES))
    for axis in AXES:
        if axis not in names:
            later = [names.index(name) for name in AXES[AXES.index(axis) + 1 :] if name in names]
            names.insert(min(later, default=len(names)), axis)
    return names


def changes(layout: Layout, near: Layout) -> tuple[int, int]:
    """Axes of another size, and options that differ."""
    options = ("sp", "zero", "stages", "chunks", "schedule", "cp_method", "order")
    return (
        sum(max(layout.size(axis), 1) != near.size(axis) for axis in (*AXES, *EXPERT_AXES)),
        sum(getattr(layout, option) != getattr(near, option) for option in options),
    )


def _distance(layout: Layout, near: Layout) -> tuple[int, Fraction, int, str]:
    ratios = [Fraction(near.size(axis), max(layout.size(axis), 1)) for axis in (*AXES, *EXPERT_AXES)]
    far = math.prod((max(ratio, 1 / ratio) for ratio in ratios), start=Fraction(1))
    axes, options = changes(layout, near)
    return axes, far, options, print_layout(near)
