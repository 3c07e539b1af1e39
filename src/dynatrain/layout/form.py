"""What makes a layout well formed, whatever the model: the rules that need no numbers from outside."""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from dynatrain.layout.layout import AXES, EXPERT_AXES, MOST_RANKS, Layout

Name = TypeVar("Name", str, int)

CP_METHODS = ("gather", "ring", "ulysses")
"""How cp ranks attend to each other's tokens; the first goes without saying."""

SCHEDULES = ("zb", "zbv")
"""Schedules of a pipeline that bear on which layouts are legal, or on where stages are: zero bubble, and its V."""


class LayoutError(ValueError):
    """A layout, or its text, that cannot be used.

    Attributes:
        problems: every broken rule, one sentence each, with its numbers.
        nearest: texts of the nearest legal layouts, nearest first; empty where none is known.
    """

    def __init__(self, what: str, problems: tuple[str, ...], nearest: tuple[str, ...] = ()) -> None:
        self.problems = problems
        self.nearest = nearest
        hint = (f"nearest legal: {', '.join(nearest)}",) if nearest else ()
        super().__init__("\n".join((what, *(f"  - {problem}" for problem in problems), *hint)))


def form_problems(layout: Layout) -> tuple[str, ...]:
    """Every rule of form that ``layout`` breaks; empty for a well-formed one."""
    return (
        *_axis_problems(layout),
        *_option_problems(layout),
        *_pipeline_problems(layout),
        *_expert_problems(layout),
        *_order_problems(layout),
    )


def _axis_problems(layout: Layout) -> list[str]:
    names = [name for name, _ in layout.axes]
    found = [f"{name} is not an axis; axes are {', '.join(AXES)}" for name in names if name not in AXES]
    found += [f"{name} appears {names.count(name)} times; each axis appears once" for name in _repeated(names)]
    found += [
        f"{name}{size}: an axis that is named has a size of 2 or more; an axis of size 1 is left out"
        for name, size in layout.axes
        if size < 2
    ]
    if layout.world_size > MOST_RANKS:
        found.append(f"the layout has {layout.world_size} ranks; at most {MOST_RANKS}")
    return found


def _option_problems(layout: Layout) -> list[str]:
    found = []
    if layout.zero not in {1, 2, 3}:
        found.append(f"-z{layout.zero}: ZeRO stages are -z1, -z2, and 3, which is fsdp without an option")
    if layout.zero != 3 and layout.size("fsdp") == layout.size("cp") == 1:
        found.append(f"-z{layout.zero} needs an fsdp axis (or cp) of 2 or more, here fsdp is 1")
    if layout.sp and layout.size("tp") == 1:
        found.append("-sp needs a tp axis of 2 or more, here tp is 1")
    if layout.cp_method not in CP_METHODS:
        found.append(f"{layout.cp_method} is no way to attend over cp; ways are {', '.join(CP_METHODS)}")
    elif layout.cp_method != CP_METHODS[0] and layout.size("cp") == 1:
        found.append(f"-{layout.cp_method} needs a cp axis of 2 or more, here cp is 1")
    return found


def _pipeline_problems(layout: Layout) -> list[str]:
    found = []
    pp, chunks, stages = layout.size("pp"), layout.chunks, layout.stages
    if chunks < 1:
        found.append(f"v{chunks}: each pp rank has at least one stage")
    if chunks > 1 and pp == 1:
        found.append(f"v{chunks} needs a pp axis of 2 or more, here pp is 1")
    if layout.schedule not in {"", *SCHEDULES}:
        found.append(
            f"{layout.schedule} is no schedule of stages; those that a layout may name are {_listed(SCHEDULES)}"
        )
    elif layout.schedule and pp == 1:
        found.append(f"-{layout.schedule} needs a pp axis of 2 or more, here pp is 1")
    if layout.schedule == "zbv" and chunks != 2:
        found.append(f"-zbv lays two stages on each pp rank, here {chunks}; write pp{pp}v2-zbv")
    if stages and pp == 1:
        found.append(f"pinned stages {_joined(stages)} need a pp axis of 2 or more, here pp is 1")
    elif stages and len(stages) != layout.num_stages:
        ways = f"pp is {pp}" if chunks == 1 else f"pp{pp}v{chunks} has {layout.num_stages}"
        found.append(f"{len(stages)} stages are pinned ({_joined(stages)}) but {ways}")
    if any(layers < 1 for layers in stages):
        found.append(f"pinned stages {_joined(stages)}: every stage holds at least one layer")
    return found


def _expert_problems(layout: Layout) -> list[str]:
    found = [f"{axis}{layout.size(axis)}: at least 1" for axis in EXPERT_AXES if layout.size(axis) < 1]
    if found or any(size < 1 for _, size in layout.axes):
        return found
    ways, ranks = layout.ep * layout.etp, layout.inner_ranks
    if ranks % ways:
        near = max(size for size in range(1, min(ways, ranks) + 1) if ranks % size == 0)
        found.append(
            f"ep{layout.ep} x etp{layout.etp} = {ways} does not divide the {ranks} ranks of fsdp x cp x tp, which it "
            f"factors anew; nearest: ep x etp = {near}"
        )
    return found


def _order_problems(layout: Layout) -> list[str]:
    order, world = layout.order, layout.world_size
    if not order:
        return []
    if len(order) != world:
        return [f"order lists {len(order)} ranks but the layout has {world}; write the order in full"]
    if sorted(order) == list(range(world)):
        return []
    twice = ", ".join(str(rank) for rank in _repeated(order)) or "none"
    missing = ", ".join(str(rank) for rank in sorted(set(range(world)) - set(order)))
    return [f"order is not a permutation of 0..{world - 1}: twice {twice}, missing {missing}"]


def _repeated(values: Iterable[Name]) -> list[Name]:
    return [value for value, times in Counter(values).items() if times > 1]


def _listed(options: tuple[str, ...]) -> str:
    return ", ".join(f"-{option}" for option in options)


def _joined(stages: tuple[int, ...]) -> str:
    return "_".join(map(str, stages))
