"""Several logical tensors in one live one: the segments of a fused parameter, the real rows of a padded one.

A fused tensor (q, k and v, or gate and up, in one weight) is several logical tensors, each with a canonical name of its
own; so a switch, a digest and a checkpoint know q, and nothing of fusion. On a rank they lie one behind the other along
one dim, dim 0 or, of a stack of experts, dim 1: tp (etp) has cut each of them, and FSDP2 what that left of them
together; other dims are cut as ever. Vocabulary padding belongs to a layout: the logical tensor has its real rows, and
what is behind them is storage, nobody's, zero in every new layout.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dynatrain.plan.padding import GATHERED
from dynatrain.space.box import chunk
from dynatrain.space.ownership import Span
from dynatrain.space.tensor import Cuts, State

Fused = Mapping[str, Mapping[str, int | tuple[int, int]]]
"""``{module: {name of a segment: rows, or (rows, heads)}}``, segments in the order in which a tp rank's part has them.

The segment's name takes the place of the module's in the canonical name: with ``{"attn.qkv": {"attn.q": (64, 4)}}``
``layers.0.attn.qkv.weight`` holds ``layers.0.attn.q.weight``. ``rows`` are those of the whole tensor; of ``heads``,
which have equally many rows each, none is ever split by tp. They lie along the first dim that has as many rows as all
of them: in a stack [experts, out, in], as transformers holds ``experts.gate_up_proj``, along its dim 1."""


class SegmentError(ValueError):
    """Fused or padded tensors that are not as they were declared: every problem, by name."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One logical tensor inside a live one, as one rank holds it.

    Attributes:
        name: canonical.
        shape: of the logical tensor.
        spans: of all ranks, see :class:`dynatrain.space.ownership.Placement`.
        along: dim of the rows.
        number: which of the live tensor's it is.
        first: row of the rank's local tensor at which its rows begin.
        rows: how many it has there.
        within: canonical name of the live tensor where it holds more than this one; else empty.
    """

    name: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]
    along: int
    number: int
    first: int
    rows: int
    within: str

    def view(self, value: torch.Tensor, state: State, shape: tuple[int, ...]) -> torch.Tensor:
        """The slot's part, of ``shape``, of this rank's local tensor of one state; shares its memory.

        A scalar is one for all segments: the first has it, the others have copies.
        """
        if state.scalar:
            return value.clone() if self.number else value
        return value.narrow(state.dim(self.along), self.first, self.rows).reshape(shape)


@dataclass(frozen=True, slots=True)
class Segments:
    """What the user declares.

    Attributes:
        fused: fused modules.
        padded: ``{module or parameter: real rows}`` along dim 0.
        sharded: ``{module or parameter: dim}`` of plain tensors that are one tp rank's part, cut along that dim.
    """

    fused: Fused = field(default_factory=dict)
    padded: Mapping[str, int] = field(default_factory=dict)
    sharded: Mapping[str, int] = field(default_factory=dict)

    def unused(self, names: Iterable[str]) -> set[str]:
        """What is declared and stands in none of these canonical names."""
        left = {*self.fused, *self.padded, *self.sharded}
        for name in names:
            left -= {key for key in left if _at(name, key) is not None}
        return left

    def cut(self, name: str) -> int | None:
        """The dim along which build itself has cut the tensor for tp; None where it is whole, or a DTensor.

        Raises:
            SegmentError: there are several declarations.
        """
        found = [key for key in self.sharded if _at(name, key) is not None]
        if len(found) > 1:
            raise SegmentError(f"{name} falls under {' and '.join(found)}; declare it once")
        return self.sharded[found[0]] if found else None

    def key(self, name: str) -> str:
        """The declaration that a tensor falls under; empty where it is an ordinary one.

        Raises:
            SegmentError: there are several.
        """
        found = [key for key in (*self.fused, *self.padded) if _at(name, key) is not None]
        if len(found) > 1:
            raise SegmentError(f"{name} falls under {' and '.join(found)}; declare it once")
        return found[0] if found else ""

    def along(self, name: str, shape: tuple[int, ...]) -> int:
        """The dim along which the live tensor ``name`` is fused or padded: the first one that can be; else 0."""
        sizes = self.fused.get(self.key(name), {}).values()
        total = sum(size[0] if isinstance(size, tuple) else size for size in sizes)
        return shape.index(total) if total in shape else 0

    def slots(
        self, name: str, shape: tuple[int, ...], cuts: Cuts, ways: Mapping[str, int], at: int
    ) -> tuple[Slot, ...]:
        """The logical tensors in the live tensor ``name``; empty where it is one itself.

        Args:
            name: canonical.
            shape: global shape of the live tensor.
            cuts: ``(axis, dim)`` in cutting order.
            ways: of each axis in ``cuts``.
            at: index of this rank along the cuts of :meth:`along`, the first cut outermost.

        Raises:
            SegmentError: the tensor, or this layout, is not one that the declaration allows.
        """
        key = self.key(name)
        if not key:
            return ()
        along = self.along(name, shape)
        axes = [(axis, ways[axis]) for axis, dim in cuts if dim == along]
        if key in self.padded:
            real = self.padded[key]
            if not shape or shape[0] < real:
                raise SegmentError(f"{name} has shape {shape}, and is declared to have {real} real rows")
            spans = list(_real(shape[0], real, axes))
            return (Slot(name, (real, *shape[1:]), tuple(spans), 0, 0, 0, spans[at][1] - spans[at][0], ""),)
        names = [_renamed(name, key, to) for to in self.fused[key]]
        sizes = [size if isinstance(size, tuple) else (size, size) for size in self.fused[key].values()]
        _check(name, shape, along, names, sizes, axes)
        rows = [size for size, _ in sizes]
        places = list(_fused(rows, axes))
        return tuple(
            Slot(
                one,
                (*shape[:along], rows[i], *shape[along + 1 :]),
                tuple(place[i][0] for place in places),
                along,
                i,
                places[at][i][1],
                places[at][i][0][1] - places[at][i][0][0],
                name,
            )
            for i, one in enumerate(names)
        )


def check_states(name: str, slots: Sequence[Slot], states: Iterable[State]) -> list[str]:
    """The states that mix rows of different segments, or real rows with padding: one sentence each."""
    return [
        f"state {state.name} of {name} is one number for many rows, so it belongs to no segment of it, nor to its real "
        "rows alone; use an optimizer that keeps each row's own, or do not declare it"
        for state in states
        for slot in slots[:1]
        if slot.along in state.reduced or (state.block and slot.along == len(slot.shape) - 1)
    ]


def held_shape(slots: Sequence[Slot], shape: tuple[int, ...], state: State) -> tuple[int, ...]:
    """Shape of what this rank holds of all ``slots`` of a live tensor together; ``shape`` is one's of that state."""
    along = state.dim(slots[0].along)
    return (*shape[:along], max(slot.first + slot.rows for slot in slots), *shape[along + 1 :])


def _at(name: str, key: str) -> int | None:
    """Where the elements of ``key`` stand in ``name``."""
    elements, wanted = name.split("."), key.split(".")
    places = (i for i in range(len(elements)) if elements[i : i + len(wanted)] == wanted)
    return next(places, None)


def _renamed(name: str, key: str, to: str) -> str:
    elements, at = name.split("."), _at(name, key)
    assert at is not None
    return ".".join((*elements[:at], to, *elements[at + len(key.split(".")) :]))


def _check(
    name: str,
    shape: tuple[int, ...],
    along: int,
    names: list[str],
    sizes: list[tuple[int, int]],
    axes: list[tuple[str, int]],
) -> None:
    """Refuse what cannot be these segments, or cannot be cut so."""
    problems = []
    total = sum(rows for rows, _ in sizes)
    if not shape or shape[along] != total:
        problems.append(f"{name} has shape {shape}, its segments have {total} rows along one dim")
    allowed = *_EACH, *_TOGETHER
    problems += [
        f"{name} is cut by {axis} along dim {along}; segments are cut by {', '.join(allowed)}"
        for axis, _ in axes
        if axis not in allowed
    ]
    by, ways = next(((axis, ways) for axis, ways in axes if axis in _EACH), ("", 1))
    for one, (rows, heads) in zip(names, sizes, strict=True):
        if heads < 1 or rows % heads:
            problems.append(f"{one} has {rows} rows, which are not {heads} equal heads")
        elif heads % ways:
            near = [n for n in range(1, ways) if heads % n == 0]
            said = f"{one} in {name} has {heads} heads (or rows), which {by}{ways} does not divide"
            problems.append(f"{said}; nearest is {by}{near[-1]}")
    if problems:
        raise SegmentError("; ".join(problems))


_EACH, _TOGETHER = ("tp", "etp"), GATHERED
"""Axes that cut each segment by itself, and those that cut what these left of them all as one."""


def _fused(rows: list[int], axes: list[tuple[str, int]]) -> Iterator[list[tuple[Span, int]]]:
    """For each index along the cuts of dim 0: of each segment its span, and where it begins in the local tensor."""
    tps, fsdps = (math.prod(ways for axis, ways in axes if axis in of) for of in (_EACH, _TOGETHER))
    local = [size // tps for size in rows]
    total = sum(local)
    starts = list(itertools.accumulate(local, initial=0))
    for tp, fsdp in itertools.product(range(tps), range(fsdps)):
        low, high = chunk(0, total, fsdps, fsdp)
        padding = -(-total // fsdps) - (high - low)
        found = []
        for size, start in zip(local, starts, strict=False):
            first = min(max(low, start), start + size)
            last = max(first, min(high, start + size))
            at = tp * size - start
            held = last - first
            found.append(((first + at, last + at, held, held), first - low if held else 0))
        (begin, end, held, room), first = found[-1]
        found[-1] = (begin, end, held, room + padding), first
        yield found


def _real(stored: int, real: int, axes: list[tuple[str, int]]) -> Iterator[Span]:
    """For each index along the cuts of dim 0: the real rows there, and all rows of its storage."""
    for place in itertools.product(*(range(ways) for _, ways in axes)):
        low, high, room = 0, stored, stored
        for (axis, ways), index in zip(axes, place, strict=True):
            size = -(-(high - low) // ways)
            low, high = chunk(low, high, ways, index)
            room = size if axis in GATHERED else high - low
        yield min(low, real), min(high, real), high - low, room
