"""What makes a layout well formed, whatever the model: the rules that need no numbers from outside."""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from dynatrain.layout.layout import AXES, MOST_RANKS, Layout

Name = TypeVar("Name", str, int)


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
    return (*_axis_problems(layout), *_option_problems(layout), *_order_problems(layout))


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
    if layout.zero != 3 and layout.size("fsdp") == 1:
        found.append(f"-z{layout.zero} needs an fsdp axis of 2 or more, here fsdp is 1")
    if layout.sp and layout.size("tp") == 1:
        found.append("-sp needs a tp axis of 2 or more, here tp is 1")
    if layout.stages and layout.size("pp") == 1:
        found.append(f"pinned stages {_joined(layout.stages)} need a pp axis of 2 or more, here pp is 1")
    elif layout.stages and len(layout.stages) != layout.size("pp"):
        found.append(f"{len(layout.stages)} stages are pinned ({_joined(layout.stages)}) but pp is {layout.size('pp')}")
    if any(layers < 1 for layers in layout.stages):
        found.append(f"pinned stages {_joined(layout.stages)}: every stage holds at least one layer")
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


def _joined(stages: tuple[int, ...]) -> str:
    return "_".join(map(str, stages))
