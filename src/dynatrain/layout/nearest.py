"""Layouts near a given one, nearest first, legal or not: the enumeration behind "nearest legal"."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

from dynatrain.layout.layout import AXES, EXPERT_AXES, MOST_RANKS, Layout
from dynatrain.layout.text import print_layout

Sizes = dict[str, int]

Possible = Callable[[Layout], bool]
"""Whether a layout without options, of some axes, has these sizes in a legal one; False only where it has not. Its
form is not in question: experts may be dealt out over axes that it lacks."""

_EACH = 64
"""Sizes of one axis up to here are each tried."""


def ranked(layout: Layout, world_size: int | None, possible: Possible = lambda _plain: True) -> Iterator[Layout]:
    """All layouts of ``world_size`` ranks in the options of ``layout`` where they still apply, and with fewer of them.

    They come by changed axes, then by how far sizes change, then by options given up, then by text, and are made when
    they are asked for: there may be hundreds of thousands, and who takes few of them should wait for few.

    Args:
        layout: the one that is sought near. Of cp, ep and etp only what it has is kept or changed: who does not ask for
            them is not sent there.
        world_size: ranks; None for any number of them. Then each axis takes sizes up to twice its own (beyond
            :data:`_EACH` the powers of two) and the divisors of the layout's size, down to one rank in all.
        possible: spares trying all the layouts that have an impossible size.
    """
    possible = lru_cache(maxsize=None)(possible)  # most is asked again with every set of changed axes
    own = {axis: max(layout.size(axis), 1) for axis in (*AXES, *EXPERT_AXES)}
    experts = EXPERT_AXES if any(own[axis] > 1 for axis in EXPERT_AXES) else ()
    axes = (*(axis for axis in AXES if axis != "cp" or own["cp"] > 1), *experts)
    for count in range(len(axes) + 1):
        found = []
        for changed in itertools.combinations(axes, count):
            fixed = {axis: size for axis, size in own.items() if axis not in changed}
            found += [(_far(own, sizes), sizes) for sizes in _filled(fixed, changed, own, world_size, possible)]
        found.sort(key=operator.itemgetter(0))
        for _, equal in itertools.groupby(found, key=operator.itemgetter(0)):
            variants = {variant for _, sizes in equal for variant in _variants(layout, sizes)}
            yield from sorted(variants, key=lambda near: (changes(layout, near), print_layout(near)))


def _far(own: Sizes, sizes: Sizes) -> Fraction:
    """By how much sizes change, multiplied up."""
    pairs = [(own[axis], size) for axis, size in sizes.items()]
    return Fraction(math.prod(max(pair) for pair in pairs), math.prod(min(pair) for pair in pairs))


def _filled(
    sizes: Sizes, changed: tuple[str, ...], own: Sizes, world_size: int | None, possible: Possible
) -> Iterator[Sizes]:
    """Every way to give each axis of ``changed`` another size than its own, beside those that have their ``sizes``."""
    ranks, more = math.prod(size for axis, size in sizes.items() if axis in AXES), sum(axis in AXES for axis in changed)
    if ranks > MOST_RANKS or (world_size is not None and (world_size % ranks if more else world_size != ranks)):
        return
    if not possible(_plain(sizes)):
        return
    if not changed:
        if _inner(sizes) % (sizes["ep"] * sizes["etp"]) == 0:
            yield sizes
        return
    axis, *rest = changed
    if axis in EXPERT_AXES:
        choices = divisors(_inner(sizes))
    elif world_size is None:
        choices = _near_sizes(own, axis)
    else:
        choices = divisors(world_size // ranks) if more > 1 else (world_size // ranks,)
    for size in choices:
        if size != own[axis] and possible(_plain({axis: size})):
            yield from _filled({**sizes, axis: size}, tuple(rest), own, world_size, possible)


def _inner(sizes: Sizes) -> int:
    return sizes["fsdp"] * sizes["cp"] * sizes["tp"]


def _plain(sizes: Sizes) -> Layout:
    """The layout of the axes that have a size yet, without options."""
    axes = tuple((axis, sizes[axis]) for axis in AXES if sizes.get(axis, 1) > 1)
    return Layout(axes=axes, ep=sizes.get("ep", 1), etp=sizes.get("etp", 1))


def _near_sizes(own: Sizes, axis: str) -> tuple[int, ...]:
    """Sizes of one axis in a world of any size."""
    most, ranks = 2 * own[axis], math.prod(own[axis] for axis in AXES)
    powers = (1 << power for power in range(_EACH.bit_length(), most.bit_length()))
    whole = divisors(ranks) if ranks <= MOST_RANKS else ()
    return tuple(sorted({*range(1, min(most, _EACH) + 1), *powers, *whole}))


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a number of at least 1, ascending; in steps that grow as its root."""
    low = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return tuple(sorted({*low, *(number // i for i in low)}))


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
    without.append({**plain, "chunks": 1})
    yield kept
    for less in without:
        if any(getattr(kept, name) != value for name, value in less.items()):
            yield dataclasses.replace(kept, **less)


def _kept(layout: Layout, sizes: Sizes) -> Layout:
    """``layout`` with other sizes, and of its options those that may stand beside them."""
    world = math.prod(sizes[axis] for axis in AXES)
    staged, context, sharded = sizes["pp"] > 1, sizes["cp"] > 1, sizes["fsdp"] * sizes["cp"] > 1
    chunks = max(layout.chunks, 1) if staged else 1
    return Layout(
        axes=tuple((axis, sizes[axis]) for axis in _rank_order(layout) if sizes[axis] > 1),
        chunks=chunks,
        stages=layout.stages if staged and len(layout.stages) == sizes["pp"] * chunks else (),
        schedule=layout.schedule if staged else "",
        zero=layout.zero if sharded and layout.zero in {1, 2} else 3,
        cp_method=layout.cp_method if context else "gather",
        sp=layout.sp and sizes["tp"] > 1,
        ep=sizes["ep"],
        etp=sizes["etp"],
        order=layout.order if layout.order and sorted(layout.order) == list(range(world)) else (),
    )


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
