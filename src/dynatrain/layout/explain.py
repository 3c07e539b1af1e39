"""A layout, or the difference of two, in plain sentences for people."""

from dynatrain.layout.layout import AXES, Coordinates, Layout
from dynatrain.layout.text import print_layout, short_layout

_TABLE = 16
"""Most ranks of which a table is still read."""

_ZERO = {
    3: "parameters are gathered for each use and freed after it (ZeRO-3)",
    2: "parameters stay gathered until after the backward pass (ZeRO-2)",
    1: "parameters are gathered once a step, gradients reduced on the last micro-batch (ZeRO-1)",
}


def describe(layout: Layout) -> tuple[str, ...]:
    """What each axis of ``layout`` does, one line each, and for a small world where each rank sits."""
    ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
    lines = [f"{short_layout(layout)}: {ranks}"]
    lines += [f"  {name}{size}: {_meaning(layout, name, size)}" for name, size in layout.axes]
    if layout.order:
        lines.append("  order: ranks are placed in the pinned order, not by number")
    if 1 < layout.world_size <= _TABLE:
        names = [name for name, _ in layout.axes]
        lines.append("  " + "  ".join(f"{name:>4}" for name in ("rank", *names)))
        for rank in range(layout.world_size):
            at = layout.coordinates(rank)
            lines.append("  " + "  ".join(f"{number:>4}" for number in (rank, *map(at.along, names))))
    return tuple(lines)


def difference(old: Layout, new: Layout) -> tuple[str, ...]:
    """What changes from ``old`` to ``new``: axes, options, and how many ranks sit elsewhere; one line each."""
    title = f"{short_layout(old)} -> {short_layout(new)}"
    if print_layout(old) == print_layout(new):
        return (f"{title}: the same layout",)
    lines = [title]
    lines += [f"  {axis}: {old.size(axis)} -> {new.size(axis)}" for axis in AXES if old.size(axis) != new.size(axis)]
    lines += _option_changes(old, new)
    common = min(old.world_size, new.world_size)
    moved = sum(old.coordinates(rank) != new.coordinates(rank) for rank in range(common))
    lines.append(f"  {moved} of {common} ranks sit at another place")
    if new.world_size != old.world_size:
        verb = "join" if new.world_size > common else "leave"
        lines.append(f"  {abs(new.world_size - old.world_size)} ranks {verb}")
    return tuple(lines)


def _meaning(layout: Layout, axis: str, size: int) -> str:
    if axis == "pp":
        split = f", of {', '.join(map(str, layout.stages))} layers" if layout.stages else ""
        return f"{size} pipeline stages{split}; {_apart(layout, axis)}"
    if axis == "dp":
        return f"{size} replicas, each with its own samples; {_apart(layout, axis)}"
    if axis == "fsdp":
        return f"state cut {size} ways, each rank with its own samples; {_ZERO[layout.zero]}; {_apart(layout, axis)}"
    sp = ", and the sequence between them (sequence parallel)" if layout.sp else ""
    return f"each layer's matrices cut {size} ways{sp}; {_apart(layout, axis)}"


def _apart(layout: Layout, axis: str) -> str:
    """The ranks of the first group along ``axis``."""
    group = [layout.rank_at(Coordinates(**{axis: i})) for i in range(layout.size(axis))]
    shown = ", ".join(map(str, group if len(group) <= 4 else group[:3]))
    return f"first group: ranks {shown}{f', ... {group[-1]}' if len(group) > 4 else ''}"


def _option_changes(old: Layout, new: Layout) -> list[str]:
    def split(layout: Layout) -> str:
        return ", ".join(map(str, layout.stages)) or "default split"

    found = []
    if old.stages != new.stages:
        found.append(f"  layers per stage: {split(old)} -> {split(new)}")
    if old.zero != new.zero:
        found.append(f"  ZeRO stage: {old.zero} -> {new.zero}")
    if old.sp != new.sp:
        found.append(f"  sequence parallel: {'off -> on' if new.sp else 'on -> off'}")
    names = [[name for name, _ in layout.axes] for layout in (old, new)]
    kept = [[name for name in names[i] if name in names[1 - i]] for i in (0, 1)]
    if kept[0] != kept[1]:
        found.append(f"  rank order of axes: {', '.join(names[0])} -> {', '.join(names[1])}")
    if old.order != new.order:
        found.append("  the pinned order of ranks changes")
    return found
