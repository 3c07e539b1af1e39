"""Ownership and pieces, read from live modules and their optimizer.

What is trusted of a DTensor is its local shape, its mesh coordinates and the *names* of the axes that shard it; the
box itself comes from our own formula. Placements' arithmetic is wrong for uneven nested shards, so it is not used,
and a local shape that is not what the formula says is refused by name.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dynatrain.layout.layout import Layout, name_of
from dynatrain.models.names import NameRule
from dynatrain.space.box import Box, shape_of, volume
from dynatrain.space.ownership import Ownership, Placement, Span
from dynatrain.space.tensor import ITEMSIZE, Catalogue, State, Tensor
from dynatrain.train.groups import axis_members
from dynatrain.train.segments import SegmentError, Segments, Slot, check_states
from dynatrain.train.torch_private import local_tensor
from dynatrain.train.torch_private_fsdp import padded_numels

CUT_ORDER = ("ep", "etp", "tp", "efsdp", "fsdp")
"""Axes in the order in which they cut a tensor: what FSDP2 cuts is what the others left."""


class UnplacedTensorError(ValueError):
    """A live tensor that no layout describes: every problem found, by name."""


@dataclass(slots=True)
class Entry:
    """One live tensor of this rank.

    Attributes:
        name: canonical.
        value: the parameter or buffer object.
        paths: ``(part index, path)`` of every place that holds it (a tied tensor has two).
        kind: ``param`` or ``buffer``.
        stored: elements of its storage, FSDP2's padding included.
        shape: global.
        by_hand: the cut that ``build`` made itself, of which its type says nothing.
        slots: the logical tensors that lie in it; empty where it is one itself.
    """

    name: str
    value: torch.Tensor
    paths: list[tuple[int, str]]
    kind: str
    stored: int
    shape: tuple[int, ...]
    by_hand: tuple[tuple[str, int], ...] = ()
    slots: tuple[Slot, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The logical tensors in it."""
        return tuple(slot.name for slot in self.slots) or (self.name,)


@dataclass(frozen=True, slots=True)
class Described:
    """What one rank tells the others about one of its tensors; all fields are plain values."""

    name: str
    shape: tuple[int, ...]
    cuts: tuple[tuple[str, int], ...]
    states: tuple[State, ...]
    stage: int
    spans: tuple[Span, ...] = ()
    along: int = 0
    within: str = ""


def entries(parts: Sequence[nn.Module], rule: NameRule) -> dict[str, Entry]:
    """All parameters and persistent or plain buffers of ``parts``, by canonical name, in order of construction."""
    found: dict[str, Entry] = {}
    by_object: dict[int, Entry] = {}
    problems = []
    for number, part in enumerate(parts):
        padded = padded_numels(part)
        for kind, path, value in _tensors(part):
            if id(value) in by_object:
                by_object[id(value)].paths.append((number, path))
                continue
            name = rule(part, path)
            if name in found:
                problems.append(f"two tensors are called {name}: {found[name].paths[0][1]} and {path}")
                continue
            stored = padded.get(path, local_tensor(value).numel())
            found[name] = by_object[id(value)] = Entry(name, value, [(number, path)], kind, stored, tuple(value.shape))
    if problems:
        raise UnplacedTensorError("; ".join(problems) + ". Give each its own canonical name (Switcher(names=...)).")
    return found


def find_slots(found: Mapping[str, Entry], segments: Segments, layout: Layout, rank: int) -> None:
    """Write into every fused or padded entry what lies in it, and into those that are cut by hand how.

    Raises:
        SegmentError: tensors that are not as declared: every problem, by name.
    """
    problems = []
    for name, entry in found.items():
        try:
            if (dim := segments.cut(name)) is not None:
                _cut_by_hand(entry, dim, layout.ways("tp"))
            if segments.key(name):
                shape, cuts = entry.shape, cuts_in(entry)
                ways = {axis: layout.ways(axis) for axis, _ in cuts}
                along, at = segments.along(name, shape), 0
                for axis in (axis for axis, dim in cuts if dim == along):
                    at = at * ways[axis] + layout.index(axis, rank)
                entry.slots = segments.slots(name, shape, cuts, ways, at)
        except ValueError as problem:
            problems.append(str(problem))
    times = Counter(name for entry in found.values() for name in entry.names)
    if twice := sorted(name for name, count in times.items() if count > 1):
        problems.append(f"segments and tensors share the names {', '.join(twice)}")
    if problems:
        raise SegmentError("; ".join(problems))


def _cut_by_hand(entry: Entry, dim: int, ways: int) -> None:
    """Take ``entry`` for one of ``ways`` equal parts along ``dim``.

    Raises:
        SegmentError: it cannot be one.
    """
    if not 0 <= dim < len(entry.shape):
        raise SegmentError(f"{entry.name} has shape {entry.shape} and no dim {dim}, along which it is declared sharded")
    if any(axis.startswith("tp") for axis, _ in cuts_of(entry.value)):
        raise SegmentError(f"{entry.name} is declared sharded by hand, and is a DTensor that tp cuts; declare it not")
    if ways > 1:
        entry.by_hand = (("tp", dim),)
        entry.shape = (*entry.shape[:dim], ways * entry.shape[dim], *entry.shape[dim + 1 :])


def cuts_in(entry: Entry) -> tuple[tuple[str, int], ...]:
    """As :func:`cuts_of`, with the cut that was made by hand."""
    cuts = (*entry.by_hand, *cuts_of(entry.value))
    return tuple(sorted(cuts, key=lambda cut: CUT_ORDER.index(name_of(cut[0]))))


def _tensors(part: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for path, param in part.named_parameters(remove_duplicate=False):
        yield "param", path, param
    for path, buffer in part.named_buffers(remove_duplicate=False):
        yield "buffer", path, buffer


def cuts_of(value: torch.Tensor) -> tuple[tuple[str, int], ...]:
    """``(axis, dim)`` of the axes that shard ``value``, in cutting order; axes of size 1 are left out.

    A mesh axis is called what :meth:`~dynatrain.layout.layout.Layout.digit` calls it: ``tp2`` has two parts of the tp
    ranks; whatever axis counts the ranks of one part does not shard.

    Raises:
        UnplacedTensorError: an axis without a name of ours, or a pending sum.
    """
    if not isinstance(value, DTensor):
        return ()
    sharded: dict[str, tuple[str, int]] = {}
    mesh = value.device_mesh
    for axis, placement in zip(mesh.mesh_dim_names or (), value.placements, strict=True):
        if placement.is_partial():
            raise UnplacedTensorError(f"its value is a pending sum over axis {axis}")
        if mesh.size(mesh.mesh_dim_names.index(axis)) == 1 or placement.is_replicate():
            continue
        if name_of(axis) not in CUT_ORDER:
            raise UnplacedTensorError(f"axis {axis} shards it; only {', '.join(CUT_ORDER)} may")
        sharded[name_of(axis)] = axis, placement.dim  # also of _StridedShard, which is not a Shard
    return tuple(sharded[name] for name in CUT_ORDER if name in sharded)


def misplaced(value: torch.Tensor, layout: Layout, rank: int) -> list[str]:
    """Why the mesh that cuts ``value`` does not deal its shards out as ``layout`` does; empty where it does.

    A mesh of equal sizes may count its ranks in another order: every shard then has the right shape, and another place.
    """
    if not isinstance(value, DTensor):
        return []
    mesh, problems = value.device_mesh, []
    coordinates = mesh.get_coordinate()
    for axis, _ in cuts_of(value):
        dim = (mesh.mesh_dim_names or ()).index(axis)
        wanted = axis_members(layout, axis, rank)
        # FSDP2 shards by the rank in the axis' group, DTensor by the coordinate in the mesh: torch sorts the one only.
        at = wanted[coordinates[dim]] if coordinates and coordinates[dim] < len(wanted) else None
        members = dist.get_process_group_ranks(mesh.get_group(dim))
        if members != wanted or at != rank:
            problems.append(
                f"axis {axis} of its mesh has rank {rank} at place {coordinates and coordinates[dim]} of ranks "
                f"{members}, {layout.axes} at place {layout.index(axis, rank)} of {wanted}; cut the mesh that build is "
                "given (mesh['fsdp'], mesh['tp'], ...): an order of your own belongs into the layout (order_...)"
            )
    return problems


def disordered(value: torch.Tensor) -> str:
    """Why the part of ``value`` that a rank holds is not its box, of a sharding that names the right axes; else empty.

    Placements are read from the left; a split factor says into how many strips a dim was cut before. That is by the
    axes to the right that come first here, as FSDP2 has it. More strips are several tensors packed in one; fewer, a
    tensor that FSDP2 has not cut, where fsdp came first.
    """
    if not isinstance(value, DTensor):
        return ""
    mesh = value.device_mesh
    names = [name_of(axis) for axis in mesh.mesh_dim_names or ()]
    cutting = [n for n, placed in enumerate(value.placements) if mesh.size(n) > 1 and not placed.is_replicate()]
    for n in cutting:
        dim, strips = value.placements[n].dim, getattr(value.placements[n], "split_factor", 1)
        before = [
            other
            for other in cutting
            if other > n
            and value.placements[other].dim == dim
            and CUT_ORDER.index(names[other]) < CUT_ORDER.index(names[n])
        ]
        if strips > (known := math.prod(mesh.size(other) for other in before)):
            return (
                f"{names[n]} cuts {strips} strips of dim {dim}, so a rank holds a part of each; name the tensors that "
                "are packed in it: Switcher(segments=...)"
            )
        if strips != known:
            return (
                f"{names[n]} cuts dim {dim} before {', '.join(names[other] for other in before)} does; cut it as "
                f"fully_shard would, in the order {', '.join(CUT_ORDER)}"
            )
    return ""


def describe(
    found: Mapping[str, Entry], states: Mapping[str, tuple[State, ...]], layout: Layout, rank: int
) -> tuple[Described, ...]:
    """This rank's tensors as the others need to know them; refuses local shapes that the formula does not give."""
    problems = []
    described = []
    stage = layout.coordinates(rank).pp
    for name, entry in found.items():
        try:
            cuts = cuts_in(entry)
        except UnplacedTensorError as problem:
            problems.append(f"{name}: {problem}")
            continue
        problems += [f"{name}: {problem}" for problem in misplaced(entry.value, layout, rank)]
        problems += [
            f"{name}: {state.name} has dtype {state.dtype}, which no switch moves; these are {', '.join(ITEMSIZE)}"
            for state in states[name]
            if state.dtype not in ITEMSIZE
        ]
        item = Described(name, entry.shape, cuts, states[name], stage)
        local = tuple(local_tensor(entry.value).shape)
        box = box_of(item.shape, cuts, layout, rank)
        both_empty = volume(box) == 0 and local_tensor(entry.value).numel() == 0
        if local != shape_of(box) and not both_empty:
            problems.append(
                f"{name}: rank {rank} holds {local} of {item.shape}, but under {layout.axes} with cuts {cuts} "
                f"its box is {box}; shard it as torch does (ceil-sized chunks)"
            )
        elif not entry.slots and (wrong := disordered(entry.value)):
            problems.append(f"{name}: {wrong}")
        problems += check_states(name, entry.slots, states[name])
        problems += [
            f"state {state.name} of {name} is one number for many elements, but this rank counts those of its part; "
            "a parameter that is sharded by hand needs an optimizer that treats each element by itself"
            for state in states[name]
            if entry.by_hand and (state.reduced or state.block)
        ]
        described += [
            replace(item, name=slot.name, shape=slot.shape, spans=slot.spans, along=slot.along, within=slot.within)
            for slot in entry.slots
        ] or [item]
    if problems:
        raise UnplacedTensorError("; ".join(problems))
    return tuple(described)


def box_of(shape: tuple[int, ...], cuts: tuple[tuple[str, int], ...], layout: Layout, rank: int) -> Box:
    """The box of ``rank`` of a tensor that its stage holds."""
    here = Placement(cuts, (layout.coordinates(rank).pp,))
    box = Ownership(layout, {"": here}).box(Tensor("", shape, cuts, (), (), ""), rank)
    assert box is not None
    return box


def merge(reports: Sequence[Sequence[Described]], layout: Layout) -> tuple[Catalogue, Ownership]:
    """The whole job from every rank's report, in one order that is equal on all ranks.

    Args:
        reports: by rank.
        layout: that they were read under.

    Raises:
        UnplacedTensorError: ranks that disagree on a tensor's shape, dtypes, states or cuts; tensors that only some
            ranks of a stage have.
    """
    first: dict[str, tuple[int, Described]] = {}
    stages: dict[str, set[int]] = {}
    problems = []
    by_stage = sorted(range(len(reports)), key=lambda rank: (layout.coordinates(rank).pp, rank))
    for rank in by_stage:
        for item in reports[rank]:
            stages.setdefault(item.name, set()).add(item.stage)
            seen_on, seen = first.setdefault(item.name, (rank, item))
            if replace(seen, stage=item.stage) != item:
                problems.append(f"{item.name}: rank {seen_on} has {_brief(seen)}, rank {rank} has {_brief(item)}")
    problems += _held_in_part(reports, layout)
    if problems:
        raise UnplacedTensorError("; ".join(problems))
    catalogue = tuple(
        Tensor(name, item.shape, item.cuts, (), item.states, unit_of(name), item.within)
        for name, (_, item) in first.items()
    )
    placements = {
        name: Placement(item.cuts, tuple(sorted(stages[name])), item.spans, item.along)
        for name, (_, item) in first.items()
    }
    return catalogue, Ownership(layout, placements)


def _held_in_part(reports: Sequence[Sequence[Described]], layout: Layout) -> list[str]:
    """The tensors that some ranks of a stage hold and others of it do not: no box says that."""
    stages: dict[int, list[int]] = {}
    for rank in range(len(reports)):
        stages.setdefault(layout.coordinates(rank).pp, []).append(rank)
    names = [dict.fromkeys(item.name for item in report) for report in reports]
    return [
        f"{name}: of one stage ranks {[rank for rank in ranks if name in names[rank]]} hold it and ranks {without} do "
        "not; have all of them build it, cut or copied (experts: one stack, cut by ep)"
        for ranks in stages.values()
        for name in dict.fromkeys(name for rank in ranks for name in names[rank])
        if (without := [rank for rank in ranks if name not in names[rank]])
    ]


def _brief(item: Described) -> str:
    return f"{item.shape} cut {item.cuts} with {[(state.name, state.dtype) for state in item.states]}"


def unit_of(name: str) -> str:
    """The unit of a tensor by its name: up to and with the first number, else the first element."""
    elements = name.split(".")
    for place, element in enumerate(elements):
        if element.isdigit():
            return ".".join(elements[: place + 1])
    return elements[0]


def renew_buffers(parts: Sequence[nn.Module], found: Mapping[str, Entry]) -> None:
    """Look up the buffers anew that a forward has put in the place of others (``self.n = self.n + 1``).

    What is no longer of the shape, dtype, device and cut that it was built with stays as it was found: see
    :func:`dynatrain.train.install.check_tensors`, which refuses it.
    """
    for entry in found.values():
        if entry.kind == "buffer":
            now = {id(value): value for value in (_at(parts[part], path) for part, path in entry.paths)}
            value = next(iter(now.values()))
            if len(now) == 1 and isinstance(value, torch.Tensor) and _kind_of(value) == _kind_of(entry.value):
                entry.value = value


def _at(part: nn.Module, path: str) -> object:
    owner, _, name = path.rpartition(".")
    return getattr(part.get_submodule(owner), name, None)


def _kind_of(value: torch.Tensor) -> tuple[object, ...]:
    return tuple(value.shape), value.dtype, value.device, cuts_of(value), tuple(local_tensor(value).shape)


def reshard(part: nn.Module) -> None:
    """Drop all gathered parameters: shards alone are left, and the optimizer's writes to them are seen."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
