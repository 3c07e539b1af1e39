"""A layout, or the difference of two, in plain sentences for people."""

from dynatrain.layout.layout import AXES, EXPERT_AXES, Coordinates, Layout
from dynatrain.layout.text import print_layout, short_layout

_TABLE = 16
"""Most ranks of which a table is still read."""

_ZERO = {
    3: "parameters are gathered for each use and freed after it (ZeRO-3)",
    2: "parameters stay gathered until after the backward pass (ZeRO-2)",
    1: "parameters are gathered once a step, gradients reduced on the last micro-batch (ZeRO-1)",
}

_CP = {
    "gather": "keys and values gathered",
    "ring": "keys and values passed round",
    "ulysses": "heads exchanged for tokens before attention and back after it",
}
_SCHEDULE = {"zb": "zero bubble", "zbv": "zero bubble, stages laid as a V"}


def describe(layout: Layout) -> tuple[str, ...]:
    """What each axis of ``layout`` does, one line each, and for a small world where each rank sits."""
    ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
    lines = [f"{short_layout(layout)}: {ranks}"]
    named = [*layout.axes, *((axis, layout.size(axis)) for axis in EXPERT_AXES if layout.size(axis) > 1)]
    lines += [f"  {name}{size}: {_meaning(layout, name, size)}" for name, size in named]
    if layout.order:
        lines.append("  order: ranks are placed in the pinned order, not by number")
    if 1 < layout.world_size <= _TABLE:
        names = [name for name, _ in named]
        lines.append("  " + "  ".join(f"{name:>4}" for name in ("rank", *names)))
        for rank in range(layout.world_size):
            at = layout.coordinates(rank)
            places = [at.along(name) if name in AXES else layout.index(name, rank) for name in names]
            lines.append("  " + "  ".join(f"{number:>4}" for number in (rank, *places)))
    return tuple(lines)


def difference(old: Layout, new: Layout) -> tuple[str, ...]:
    """What changes from ``old`` to ``new``: axes, options, and how many ranks sit elsewhere; one line each."""
    title = f"{short_layout(old)} -> {short_layout(new)}"
    if print_layout(old) == print_layout(new):
        return (f"{title}: the same layout",)
    lines = [title]
    axes = (*AXES, *EXPERT_AXES)
    lines += [f"  {axis}: {old.size(axis)} -> {new.size(axis)}" for axis in axes if old.size(axis) != new.size(axis)]
    lines += _option_changes(old, new)
    common = min(old.world_size, new.world_size)
    moved = sum(_place(old, rank) != _place(new, rank) for rank in range(common))
    lines.append(f"  {moved} of {common} ranks sit at another place")
    if new.world_size != old.world_size:
        verb = "join" if new.world_size > common else "leave"
        lines.append(f"  {abs(new.world_size - old.world_size)} ranks {verb}")
    return tuple(lines)


def _place(layout: Layout, rank: int) -> tuple[object, ...]:
    """Where ``rank`` sits, among experts too."""
    return (layout.coordinates(rank), *(layout.index(axis, rank) for axis in EXPERT_AXES))


def _meaning(layout: Layout, axis: str, size: int) -> str:
    if axis == "pp":
        split = f", of {', '.join(map(str, layout.stages))} layers" if layout.stages else ""
        named = (
            f"{size} pipeline stages" if layout.chunks == 1 else f"{layout.num_stages} pipeline stages on {size} ranks"
        )
        schedule = f"; {_SCHEDULE[layout.schedule]}" if layout.schedule else ""
        return f"{named}{split}{schedule}; {_apart(layout, axis)}"
    left = layout.ways("efsdp")
    spare = f", each of which {left} ranks share" if left > 1 else ""
    sp = ", and the sequence between them (sequence parallel)" if layout.sp else ""
    zero = "" if layout.size("fsdp") > 1 else f"; {_ZERO[layout.zero]}"
    meaning = {
        "dp": f"{size} replicas, each with its own samples",
        "fsdp": f"state cut {size} ways, each rank with its own samples; {_ZERO[layout.zero]}",
        "cp": f"each sequence cut {size} ways, {_CP[layout.cp_method]}; cuts state as fsdp does{zero}",
        "tp": f"each layer's matrices cut {size} ways{sp}",
        "ep": f"experts dealt out to {size} groups of ranks{spare}",
        "etp": f"each expert's matrices cut {size} ways",
    }
    return f"{meaning[axis]}; {_apart(layout, axis)}"


def _apart(layout: Layout, axis: str) -> str:
    """The ranks of the first group along ``axis``."""
    if axis in AXES:
        group = [layout.rank_at(Coordinates(**{axis: i})) for i in range(layout.size(axis))]
    else:
        stride, ways = layout.digit(axis)
        group = [layout.rank_of(i * stride) for i in range(ways)]
    shown = ", ".join(map(str, group if len(group) <= 4 else group[:3]))
    return f"first group: ranks {shown}{f', ... {group[-1]}' if len(group) > 4 else ''}"


def _option_changes(old: Layout, new: Layout) -> list[str]:
    def split(layout: Layout) -> str:
        return ", ".join(map(str, layout.stages)) or "default split"

    found = []
    if old.chunks != new.chunks:
        found.append(f"  stages per pp rank: {old.chunks} -> {new.chunks}")
    if old.stages != new.stages:
        found.append(f"  layers per stage: {split(old)} -> {split(new)}")
    if old.schedule != new.schedule:
        before, after = (layout.schedule or "the run's own" for layout in (old, new))
        found.append(f"  schedule of the pipeline: {before} -> {after}")
    if old.zero != new.zero:
        found.append(f"  ZeRO stage: {old.zero} -> {new.zero}")
    if old.cp_method != new.cp_method:
        found.append(f"  attention over cp: {old.cp_method} -> {new.cp_method}")
    if old.sp != new.sp:
        found.append(f"  sequence parallel: {'off -> on' if new.sp else 'on -> off'}")
    names = [[name for name, _ in layout.axes] for layout in (old, new)]
    kept = [[name for name in names[i] if name in names[1 - i]] for i in (0, 1)]
    if kept[0] != kept[1]:
        found.append(f"  rank order of axes: {', '.join(names[0])} -> {', '.join(names[1])}")
    if old.order != new.order:
        found.append("  the pinned order of ranks changes")
    return found
