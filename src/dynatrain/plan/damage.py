"""What is wrong with a plan record as read from JSON: its form, and what its tensors could not be in its layouts."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynatrain.layout.form import LayoutError
from dynatrain.layout.layout import SHARD_AXES, Layout, name_of
from dynatrain.layout.text import parse_layout
from dynatrain.observe.fields import Rule, count, flag, hexadecimal, one_of, problems_of, text
from dynatrain.observe.modes import DECIDED, mode_problem
from dynatrain.space.tensor import ITEMSIZE

_MOST_BYTES = 1 << 60
"""Above what any machine holds, and below where sums over ranks leave 64 bits."""


def _cut(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and _shards(value[0]) and count(value[1])


def _shards(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(rf"({'|'.join(SHARD_AXES)})([1-9][0-9]{{0,8}})?", value) is not None


def _anchor(value: object) -> bool:
    return count(value) or text(value)


def _node(value: object) -> bool:
    return value is None or (count(value) and value != 0)


def _span(value: object) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(count, value)) and value[0] <= value[1]


def _step(value: object) -> bool:
    return value is None or count(value)


_KEPT: Rule = {"holder": count, "owner": count, "step": count, "live": flag, "complete": flag}
_LOSS: Rule = {"lost": [count], "step": count, "files": _step, "kept": [_KEPT]}


def _lost(value: object) -> bool:
    return value is None or not problems_of("loss", value, _LOSS)


_PLACEMENT: Rule = {"cuts": [_cut], "stages": [count], "spans": [_span], "along": count}
_STATE: Rule = {"name": text, "dtype": one_of(*ITEMSIZE), "scalar": flag, "reduced": [count], "block": count}
_RECORD: Rule = {
    "schema": count,
    "from": text,
    "to": text,
    "members": [count],
    "holders": [count],
    "loss": _lost,
    "mode": text,
    "budget_bytes": count,
    "round_bytes": count,
    "ranks_per_node": _node,
    "plan_hash": hexadecimal,
    "rounds": count,
    "bytes": {"moved": count, "relaid": count, "adopted": count},
    "peak_bytes": [count],
    "floor_bytes": {"link": count, "machine": count},
    "tensors": [
        {
            "tensor": {
                "name": text,
                "shape": [count],
                "cuts": [_cut],
                "anchors": [_anchor],
                "states": [_STATE],
                "unit": text,
                "within": lambda value: isinstance(value, str),
            },
            "old": _PLACEMENT,
            "new": _PLACEMENT,
            "adoptable": flag,
        }
    ],
}


def damage(record: object) -> tuple[str, ...]:
    """Every problem of a plan record of this version's schema; empty where it can be derived anew."""
    problems = problems_of("plan", record, _RECORD)
    if problems or not isinstance(record, Mapping):
        return problems
    layouts: dict[str, Layout] = {}
    for side, name in (("old", "from"), ("new", "to")):
        try:
            layouts[side] = parse_layout(record[name])
        except LayoutError as error:
            problems += (f"{name} is {error}",)
    problems = problems or (
        *_of_members(record["members"], layouts["old"].world_size, layouts["new"].world_size),
        *_of_loss(record, layouts["old"].world_size),
    )
    if problems:
        return problems
    return (*_of_whole(record, layouts), *(p for one in record["tensors"] for p in _of_tensor(one, layouts)))


def _of_whole(record: Mapping[str, Any], layouts: Mapping[str, Layout]) -> Iterator[str]:
    if problem := mode_problem(record["mode"], DECIDED):
        yield problem
    tensors = record["tensors"]
    ranks = max(*(layout.world_size for layout in layouts.values()), *(holder + 1 for holder in record["members"]))
    granules = sum(len(one["tensor"]["states"]) for one in tensors)
    if not tensors:
        yield "the plan has no tensors"
    elif not 1 <= record["rounds"] <= granules:
        yield f"rounds is {record['rounds']}; {granules} granules take 1 to {granules}"
    if len(record["peak_bytes"]) != ranks:
        yield f"peak_bytes has {len(record['peak_bytes'])} numbers for {ranks} ranks"
    if twice := [name for name, times in Counter(one["tensor"]["name"] for one in tensors).items() if times > 1]:
        yield f"tensors {twice} appear twice; each appears once"
    if sum(map(_bytes, tensors)) * ranks > _MOST_BYTES:
        yield f"the tensors have more bytes than {ranks} ranks can hold"


def _of_members(members: Sequence[int], old: int, new: int) -> Iterator[str]:
    """Members that are not each rank of the new layout once, newcomers numbered from the old ranks on."""
    newcomers = sorted(holder for holder in members if holder >= old)
    if members and (len(members) != new or len({*members}) != new or newcomers != [*range(old, old + len(newcomers))]):
        yield (
            f"members are {members}; each of the {new} ranks of the new layout is one of 0 .. {old - 1}, the old "
            f"ranks, or a newcomer; newcomers are {old}, {old + 1}, ..."
        )


def _of_loss(record: Mapping[str, Any], old: int) -> Iterator[str]:
    """What cannot be after a loss of some of ``old`` ranks, or where nobody is lost."""
    holders, loss = record["holders"], record["loss"]
    if loss is None:
        if holders:
            yield f"holders are {holders}, and nobody is lost: ranks are their own holders"
        return
    if sorted(holders) != [*range(old)]:
        yield f"holders are {holders}; of {old} ranks each is another one of 0 .. {old - 1}"
    if not loss["lost"] or any(holder >= old for holder in loss["lost"]):
        yield f"lost are {loss['lost']}; at least one of the holders 0 .. {old - 1}"
    if strangers := [one for one in loss["kept"] if max(one["holder"], one["owner"]) >= old]:
        yield f"{len(strangers)} of what is kept is not of the holders 0 .. {old - 1}"
    if record["mode"] != "keep":
        yield f"mode is {record['mode']!r}; after a loss it is keep"


def _bytes(one: Mapping[str, Any]) -> int:
    """At least the bytes of one tensor with all its states, also where a dim is empty."""
    tensor = one["tensor"]
    elements = math.prod(max(int(size), 1) for size in tensor["shape"])
    return elements * sum(ITEMSIZE[state["dtype"]] for state in tensor["states"])


def _of_tensor(one: Mapping[str, Any], layouts: Mapping[str, Layout]) -> Iterator[str]:
    tensor = one["tensor"]
    name, dims = tensor["name"], len(tensor["shape"])
    if not tensor["states"]:
        yield f"{name} has no state"
    for state in tensor["states"]:
        yield from _of_form(f"{name} {state['name']}", state, dims)
    yield from _of_cuts(name, tensor["cuts"], dims)
    for side, layout in layouts.items():
        stages, parts = one[side]["stages"], layout.size("pp")
        yield from _of_spans(f"{name}, {side}", one[side], tensor, layout)
        yield from _of_cuts(f"{name}, {side}", one[side]["cuts"], dims)
        try:
            layout.left_over(axis for axis, _ in one[side]["cuts"])
        except ValueError as error:
            yield f"{name}, {side}: {error}"
        if not stages or stages != sorted({stage for stage in stages if stage < parts}):
            yield f"{name}, {side}: stages are {stages}; at least one of 0 .. {parts - 1}, ascending"


def _of_form(name: str, state: Mapping[str, Any], dims: int) -> Iterator[str]:
    reduced = state["reduced"]
    if sum(map(bool, (state["scalar"], reduced, state["block"]))) > 1:
        yield f"{name}: a scalar, reduced and in blocks exclude one another"
    if state["block"] and not dims:
        yield f"{name}: in blocks of {state['block']} along the last of no dims"
    if reduced != sorted({dim for dim in reduced if dim < dims}):
        yield f"{name}: reduced over dims {reduced}; some of 0 .. {dims - 1}, ascending"


def _of_spans(name: str, placement: Mapping[str, Any], tensor: Mapping[str, Any], layout: Layout) -> Iterator[str]:
    spans, along, shape = placement["spans"], placement["along"], tensor["shape"]
    if not spans:
        return
    wanted = math.prod(layout.ways(axis) for axis, dim in placement["cuts"] if dim == along)
    if along >= len(shape) or len(spans) != wanted:
        yield f"{name}: {len(spans)} spans for {wanted} parts of dim {along}, of {len(shape)} dims"
    elif any(stop > shape[along] for _, stop, *_ in spans):
        yield f"{name}: spans {spans} reach beyond its {shape[along]} rows"
    elif any(along in one["reduced"] or (one["block"] and along == len(shape) - 1) for one in tensor["states"]):
        yield f"{name}: spans along dim {along}, over which a state is reduced or has blocks"


def _of_cuts(name: str, cuts: Sequence[Sequence[Any]], dims: int) -> Iterator[str]:
    axes = [name_of(axis) for axis, _ in cuts]
    if len(set(axes)) != len(axes):
        yield f"{name}: cut by {', '.join(axes)}; each axis cuts once"
    yield from (f"{name}: {axis} cuts dim {dim}; it has {dims} dims" for axis, dim in cuts if dim >= dims)
