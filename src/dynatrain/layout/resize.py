"""Which layout a world of another size gets where nobody has named one."""

from collections.abc import Callable, Iterable
from typing import Any

from dynatrain.layout.form import LayoutError
from dynatrain.layout.layout import EXPERT_AXES, MOST_RANKS, Layout
from dynatrain.layout.legality import ONE_ONE, ModelLimits, problems
from dynatrain.layout.nearest import changes, ranked
from dynatrain.layout.sizes import Sizes
from dynatrain.layout.text import print_layout

_KEPT = ("pp", "cp", "tp", *EXPERT_AXES)
"""Axes that a change of size leaves alone where it can: what they cut is bound to machines and to the model."""

_ANY = Sizes()

_SEARCHED = 64
"""How far from a size without a legal layout another one is looked for."""


def resized(
    layout: Layout,
    limits: ModelLimits,
    *,
    world_size: int,
    num_microbatches: int | None = None,
    sequence: int | None = None,
    schedule: str = ONE_ONE,
    sizes: Sizes = _ANY,
    moved: Callable[[Layout], int] | None = None,
) -> Layout:
    """The layout of ``world_size`` ranks that follows ``layout``. Deterministic.

    pp, cp, tp, ep and etp are kept while that is legal: fsdp takes the change; where the layout has no fsdp, or fsdp
    cannot, dp does; where neither can alone, both. Otherwise it is the legal layout with the fewest changed axes, then
    with the fewest options given up, then with the fewest bytes moved, then by text.

    Args:
        layout: the present one.
        limits: what the model bounds.
        world_size: ranks that there are to be.
        num_microbatches: of one global step, which stays; None where the batch is free.
        sequence: tokens of one sequence; None where it is free.
        schedule: the run's own, of pipelines whose layout names none.
        sizes: that the run may have.
        moved: bytes that the change to a layout moves; asked only between layouts that are equally near.

    Raises:
        LayoutError: the run may not have that size, or no layout of it is legal; with the rules that forbid it or that
            the obvious layout breaks, and the layouts of the nearest sizes that may be and have one. Or no world is of
            that size.
    """
    if not 1 <= world_size <= MOST_RANKS:
        near = Layout() if world_size < 1 else layout
        rule = f"a world has 1 to {MOST_RANKS} ranks"
        raise LayoutError(f"no layout has {world_size} ranks", (rule,), (print_layout(near),))
    given: dict[str, Any] = {"num_microbatches": num_microbatches, "sequence": sequence, "schedule": schedule}
    every = list(ranked(layout, world_size))
    legal = [one for one in every if not problems(one, limits, world_size=world_size, **given)]
    if not legal or not sizes.allows(world_size):
        obvious = min(every, key=lambda one: (not _keeps(layout, one), _absorbed(layout, one)))
        raise _refusal(layout, obvious, limits, sizes, given)
    kept = [one for one in legal if _keeps(layout, one)]
    if kept:
        return min(kept, key=lambda one: _absorbed(layout, one))  # of several the first: they come nearest first
    fewest = min(changes(layout, one) for one in legal)
    equal = sorted((one for one in legal if changes(layout, one) == fewest), key=print_layout)
    return equal[0] if moved is None or len(equal) == 1 else min(equal, key=moved)


def _keeps(layout: Layout, near: Layout) -> bool:
    return all(layout.size(axis) == near.size(axis) for axis in _KEPT)


def _absorbed(layout: Layout, near: Layout) -> tuple[int, int]:
    """How well fsdp, or dp, takes the change: the less the better."""
    (dp, fsdp), (old_dp, old_fsdp) = ((one.size("dp"), one.size("fsdp")) for one in (near, layout))
    sharded = old_fsdp > 1 or old_dp == 1
    if dp == old_dp and (sharded or fsdp == old_fsdp):
        return 0, 0
    if fsdp == old_fsdp:
        return 1, 0
    return 2, -(fsdp if sharded else dp)


def _refusal(layout: Layout, obvious: Layout, limits: ModelLimits, sizes: Sizes, given: dict[str, Any]) -> LayoutError:
    size = obvious.world_size
    ways = range(size - 1, max(size - 1 - _SEARCHED, 0), -1), range(size + 1, size + 1 + _SEARCHED)
    found = [near for way in ways if (near := _first(layout, limits, filter(sizes.allows, way), given)) is not None]
    others = " and ".join(str(one.world_size) for one in found) or f"none within {_SEARCHED}"
    broken = tuple(f"{print_layout(obvious)}: {problem}" for problem in problems(obvious, limits, **given))
    forbidden = () if sizes.allows(size) else (sizes.problem(size),)
    what = f"no layout of {size} ranks is legal here; nearest sizes that have one: {others}"
    return LayoutError(what, (*forbidden, *broken), tuple(map(print_layout, found)))


def _first(layout: Layout, limits: ModelLimits, sizes: Iterable[int], given: dict[str, Any]) -> Layout | None:
    """The layout of the first of ``sizes`` that has one."""
    for size in sizes:
        if any(not problems(one, limits, **given) for one in ranked(layout, size)):
            return resized(layout, limits, world_size=size, **given)
    return None
