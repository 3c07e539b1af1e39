"""The judge of publishes: does every element of the engine's own tensors come once, and is it the right one?

That moves leave what their sources hold and fill what the engine's ranks own is judged as in any plan. Here is judged
what is new: the place of each box in the engine's tensors, worked out from boxes and sizes alone, and its transform.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dynatrain.judge.shelves import judge_shelf
from dynatrain.judge.verdict import shown
from dynatrain.plan.plan import Delivery
from dynatrain.space.box import Box, shape_of, volume
from dynatrain.space.engine import Engine
from dynatrain.space.engine_names import Component, EngineTensor
from dynatrain.space.hf_names import READ_DTYPES
from dynatrain.space.tensor import State, Tensor

_Dim = TypeVar("_Dim")


@dataclass(frozen=True, slots=True)
class _Part:
    """What a rank holds of one component: its box, and where that begins along a dim of the rank's own tensor."""

    component: Component
    box: Box
    dim: int
    start: int

    @property
    def apart(self) -> bool:
        """Whether it is one expert of a stack."""
        return self.component.expert is not None


def judge_deliveries(engine: Engine, deliveries: Mapping[int, Sequence[Delivery]]) -> tuple[str, ...]:
    """Whether the ranks of an engine get all of their tensors once, in place and dtype; empty where they do.

    Args:
        engine: its layout.
        deliveries: by rank of the engine.
    """
    logical = {one.name: one for one in engine.catalogue}
    problems: list[str] = []
    for rank in engine.ranks:
        parts = {one.name: tuple(_parts(engine, logical, one, rank)) for one in engine.tensors}
        shapes = engine.local_shapes(rank)
        state = State("param", engine.dtype)  # as good as any: what is counted are elements
        whole = tuple(Tensor(name, shape, (), (), (state,), name) for name, shape in shapes.items())
        boxes: dict[str, list[Box]] = {name: [] for name in shapes}
        for one in deliveries.get(rank, ()):
            wrong = tuple(_misplaced(engine, one, parts.get(one.tensor, ())))
            problems += [f"rank {rank} of the engine: {what}" for what in wrong]
            if not wrong:
                boxes[one.tensor].append(one.place)
        gaps = judge_shelf(whole, {(number, 0): sorted(boxes[tensor.name]) for number, tensor in enumerate(whole)})
        problems += [f"rank {rank} of the engine: {gap}" for gap in gaps]
    return shown(problems, "box(es) that do not arrive as they should")


def _parts(engine: Engine, logical: Mapping[str, Tensor], tensor: EngineTensor, rank: int) -> Iterator[_Part]:
    """What a rank has of one of the engine's tensors, one component behind the other."""
    at = 0
    for component in tensor.components:
        box = engine.ownership.box(logical[component.tensor], rank)
        if box is not None and component.expert is not None:
            low, high = box[0]
            box = ((component.expert, component.expert + (low <= component.expert < high)), *box[1:])
        if box is not None and volume(box):
            part = _Part(component, box, tensor.dim, at)
            yield part
            at += _turned(shape_of(box), part)[tensor.dim]


def _misplaced(engine: Engine, one: Delivery, parts: Sequence[_Part]) -> Iterator[str]:
    """What is wrong with one delivery to a tensor that has these parts."""
    logical = engine.catalogue[one.move.tensor]
    what = f"{logical.name} {one.move.box} into {one.tensor}"
    wanted = "float32" if logical.states[0].name == "buffer" and engine.dtype != "float64" else engine.dtype
    if one.transform.cast not in READ_DTYPES or one.transform.cast != wanted:
        yield f"{what}: a cast to {one.transform.cast!r}; the engine has it as {wanted}"
    its = [part for part in parts if part.component.tensor == logical.name and _inside(one.move.box, part.box)]
    if not its:
        yield f"{what}: is no part of it"
        return
    (part,) = its
    if one.transform.transposed != part.component.transposed:
        yield f"{what}: the wrong way round"
        return
    if one.transform.apart != part.apart:
        yield f"{what}: the dim of the experts is {'there' if part.apart else 'gone'}"
        return
    found = [(low - first, high - first) for (low, high), (first, _) in zip(one.move.box, part.box, strict=True)]
    place = list(_turned(found, part))
    place[part.dim] = (place[part.dim][0] + part.start, place[part.dim][1] + part.start)
    if tuple(place) != one.place:
        yield f"{what}: goes to {one.place}; its place is {tuple(place)}"


def _turned(of_dims: Sequence[_Dim], part: _Part) -> Sequence[_Dim]:
    """Something of each dim of a logical tensor, for the dims of the engine's."""
    return of_dims[part.apart :][:: -1 if part.component.transposed else 1]


def _inside(inner: Box, outer: Box) -> bool:
    return all(first <= low and high <= last for (low, high), (first, last) in zip(inner, outer, strict=True))
