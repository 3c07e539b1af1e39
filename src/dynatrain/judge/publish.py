"""The judge of publishes: does every element of the engine's own tensors come once, and is it the right one?

That moves leave what their sources hold and fill what the engine's ranks own is judged as in any plan. Here is judged
what is new: the place of each box in the engine's tensors, worked out from boxes and sizes alone, and its transform.
"""

from collections.abc import Iterator, Mapping, Sequence

from dynatrain.judge.shelves import judge_shelf
from dynatrain.judge.verdict import shown
from dynatrain.plan.plan import Delivery
from dynatrain.space.box import Box, shape_of, volume
from dynatrain.space.engine import Engine, EngineTensor
from dynatrain.space.hf_names import READ_DTYPES
from dynatrain.space.tensor import State, Tensor


def judge_deliveries(engine: Engine, deliveries: Mapping[int, Sequence[Delivery]]) -> tuple[str, ...]:
    """Whether the ranks of an engine get all of their tensors once, in place and dtype; empty where they do.

    Args:
        engine: its layout.
        deliveries: by rank of the engine.
    """
    problems: list[str] = []
    for rank in engine.ranks:
        its = deliveries.get(rank, ())
        starts = {one.name: dict(_starts(engine, one, rank)) for one in engine.tensors}
        shapes = engine.local_shapes(rank)
        state = State("param", engine.dtype)
        whole = tuple(Tensor(name, shape, (), (), (state,), name) for name, shape in shapes.items())
        boxes: dict[str, list[Box]] = {name: [] for name in shapes}
        for one in its:
            wrong = tuple(_misplaced(engine, one, rank, starts))
            problems += wrong
            if not wrong:
                boxes[one.tensor].append(one.place)
        gaps = judge_shelf(whole, {(number, 0): sorted(boxes[tensor.name]) for number, tensor in enumerate(whole)})
        problems += [f"rank {rank} of the engine: {gap}" for gap in gaps]
    return shown(problems, "box(es) that do not arrive as they should")


def _starts(engine: Engine, tensor: EngineTensor, rank: int) -> Iterator[tuple[str, tuple[int, bool, int]]]:
    """Of each component that a rank holds: where it begins along the tensor's dim, its way round, and that dim."""
    at = 0
    for component in tensor.components:
        logical = next(one for one in engine.catalogue if one.name == component.tensor)
        box = engine.ownership.box(logical, rank)
        if box is not None and volume(box):
            sizes = shape_of(box)[:: -1 if component.transposed else 1]
            yield component.tensor, (at, component.transposed, tensor.dim)
            at += sizes[tensor.dim]


def _misplaced(
    engine: Engine, one: Delivery, rank: int, starts: Mapping[str, Mapping[str, tuple[int, bool, int]]]
) -> Iterator[str]:
    """What is wrong with one delivery."""
    logical = engine.catalogue[one.move.tensor]
    what = f"{logical.name} {one.move.box} into {one.tensor} on rank {rank} of the engine"
    if one.transform.cast not in READ_DTYPES or one.transform.cast != engine.dtype:
        yield f"{what}: a cast to {one.transform.cast!r}; the engine's weights are {engine.dtype}"
    known = starts.get(one.tensor, {}).get(logical.name)
    held = engine.ownership.box(logical, rank)
    if known is None or held is None:
        yield f"{what}: is no part of it"
        return
    start, transposed, along = known
    if transposed != one.transform.transposed:
        yield f"{what}: the wrong way round"
        return
    wanted = [(low - first, high - first) for (low, high), (first, _) in zip(one.move.box, held, strict=True)]
    wanted = wanted[::-1] if transposed else wanted
    wanted[along] = (wanted[along][0] + start, wanted[along][1] + start)
    if tuple(wanted) != one.place:
        yield f"{what}: goes to {one.place}; its place is {tuple(wanted)}"
