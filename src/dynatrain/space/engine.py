"""How an inference engine holds a model's weights: Hugging Face's names, some fused, cut by tp, in its own dtype.

An engine is a set of ranks like a run is one, so its layout is an ownership of the same logical tensors. What its own
tensors are beside that is a value here: which logical tensors lie in one of them, one behind the other along which dim,
and which way round. Each rank fuses what it holds: the rows of queries that it has, behind them its rows of keys. Of
experts a rank has some whole (ep), a part of each (tp), or a part of some.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

from dynatrain.layout.form import LayoutError
from dynatrain.layout.layout import Layout
from dynatrain.layout.legality import problems
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import parse_layout, print_layout
from dynatrain.space.blocks import BIAS, COUNTERS
from dynatrain.space.box import Box, intersect, shape_of, volume
from dynatrain.space.decoder import DecoderShape, catalogue
from dynatrain.space.engine_names import FUSED, EngineTensor, engine_tensors, run_names
from dynatrain.space.hf_config import ModelError
from dynatrain.space.hf_names import READ_DTYPES
from dynatrain.space.ownership import Ownership, declared
from dynatrain.space.tensor import ITEMSIZE, Catalogue, Tensor

_OWN_AXES = ("pp", "dp", "tp")
"""Axes that an engine has: stages, replicas, and parts of each matrix. Ranks of tp may deal experts out (ep)."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one rank of the engine has a component.

    Attributes:
        tensor: canonical name of the logical tensor.
        box: of it, that the rank holds.
        place: the same elements in the rank's own tensor; without the first dim where that has one expert apart.
        transposed: as of :class:`Component`.
    """

    tensor: str
    box: Box
    place: Box
    transposed: bool

    @property
    def apart(self) -> bool:
        """Whether the rank's own tensor lacks the dim of the experts."""
        return len(self.place) < len(self.box)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine's layout. Ranks count from 0, apart from the run's.

    Attributes:
        ownership: which rank has which box of which logical tensor.
        dtype: element type of its weights, as torch prints it without its prefix; but see :meth:`dtype_of`.
        tensors: what it has.
        catalogue: the logical tensors in them, values alone, in the run's dtypes and under the run's names.
    """

    ownership: Ownership
    dtype: str
    tensors: tuple[EngineTensor, ...]
    catalogue: Catalogue

    @classmethod
    def of(
        cls,
        shape: DecoderShape,
        layout: str,
        held: Catalogue,
        *,
        dtype: str = "bfloat16",
        fused: Mapping[str, tuple[str, ...]] = FUSED,
    ) -> Self:
        """The engine of a decoder.

        Args:
            shape: of the model.
            layout: of the engine, over ``pp``, ``dp`` (replicas) and ``tp``; with ``ep``, the ranks of tp deal the
                experts out, and what is left of tp cuts each.
            held: the run's tensors, values first: under our names, or under Hugging Face's.
            dtype: of the engine's weights.
            fused: name of each fused module, and the modules in it, in their order. A name that begins with
                ``experts.`` is one tensor of all experts of a layer, and its modules are called as in Qwen3-MoE
                (``gate_proj``); experts that are in none lie apart, under the names of the files.

        Raises:
            LayoutError: the text is no layout, or none for this model or an engine.
            ModelError: the run's tensors are not those of ``shape``, something cannot be fused, or the dtype is
                unknown; all of it, by name.
        """
        placed = _layout(shape, layout)
        made = catalogue(shape, optimizer="")
        own = {tensor.name: tensor for tensor in made if not tensor.name.endswith(COUNTERS)}
        placements = declared(tuple(own.values()), placed, shape.num_hidden_layers).placements
        known = run_names(shape, own, {tensor.name for tensor in held})
        wrong = [] if dtype in READ_DTYPES else [f"dtype is {dtype!r}; one of {', '.join(READ_DTYPES)}"]
        wrong += [f"the run has no tensor {name}" for name in sorted(own.keys() - known.values())]
        values = tuple(one for one in held if one.states[0].name != "buffer" or one.name in known)
        wrong += [
            f"the run has {tensor.name} of shape {list(tensor.shape)}; an engine of this model has none such"
            for tensor in values
            if tensor.name not in known or own[known[tensor.name]].shape != tensor.shape
        ]
        tensors, unfused = engine_tensors(shape, known, fused)
        if wrong := wrong + unfused:
            raise ModelError("these weights cannot be published like this", tuple(wrong))
        return cls(
            ownership=Ownership(placed, {name: placements[logical] for name, logical in known.items()}),
            dtype=dtype,
            tensors=tensors,
            catalogue=tuple(_value(tensor) for tensor in values),
        )

    @property
    def ranks(self) -> range:
        """The engine's ranks."""
        return range(self.ownership.layout.world_size)

    def dtype_of(self, tensor: str) -> str:
        """Element type of one of its tensors: a router's bias has 32 bits or more, as small steps move it."""
        return "float32" if tensor.endswith(BIAS) and ITEMSIZE[self.dtype] < ITEMSIZE["float32"] else self.dtype

    def slots(self, rank: int) -> dict[str, tuple[Slot, ...]]:
        """Of each tensor that a rank has, where its components lie; a tensor of which it has nothing is absent."""
        by_name = {tensor.name: tensor for tensor in self.catalogue}
        found = {}
        for tensor in self.tensors:
            if slots := tuple(self._slots(tensor, by_name, rank)):
                found[tensor.name] = slots
        return found

    def _slots(self, tensor: EngineTensor, by_name: Mapping[str, Tensor], rank: int) -> Iterator[Slot]:
        at = 0
        for component in tensor.components:
            box = self.ownership.box(by_name[component.tensor], rank)
            if box is not None and component.expert is not None:
                box = intersect(box, ((component.expert, component.expert + 1), *box[1:]))
            if box is None or not volume(box):
                continue
            sizes = component.laid(shape_of(box))
            place = [(0, size) for size in sizes]
            place[tensor.dim] = (at, at + sizes[tensor.dim])
            at += sizes[tensor.dim]
            yield Slot(component.tensor, box, tuple(place), component.transposed)

    def local_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor that a rank has, by name."""
        return {
            name: tuple(max(ends) for ends in zip(*([stop for _, stop in slot.place] for slot in slots), strict=True))
            for name, slots in self.slots(rank).items()
        }

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor as an engine of one rank has it, by name."""
        by_name = {tensor.name: tensor.shape for tensor in self.catalogue}
        found = {}
        for tensor in self.tensors:
            shapes = [one.laid(by_name[one.tensor]) for one in tensor.components]
            found[tensor.name] = (
                *shapes[0][: tensor.dim],
                sum(shape[tensor.dim] for shape in shapes),
                *shapes[0][tensor.dim + 1 :],
            )
        return found


def _layout(shape: DecoderShape, text: str) -> Layout:
    """An engine's layout out of its text."""
    layout = parse_layout(text)
    if others := [axis for axis, _ in layout.axes if axis not in _OWN_AXES]:
        fitting = ".".join(f"{axis}{size}" for axis, size in layout.axes if axis in _OWN_AXES) or "dp1"
        rule = f"{', '.join(others)}: an engine's axes are {', '.join(_OWN_AXES)} (dp: replicas)"
        raise LayoutError(f"{text!r} is no layout of an engine", (rule,), (fitting,))
    if shape.experts:
        left = layout.size("tp") // layout.ep
        if layout.etp not in {1, left}:
            rule = f"etp{layout.etp}: each expert is cut over what ep leaves of tp, {left} rank(s)"
            raise LayoutError(f"{text!r} is no layout of an engine", (rule,), (print_layout(replace(layout, etp=1)),))
        layout = replace(layout, etp=left)
    if wrong := problems(layout, shape.limits()):
        raise LayoutError(f"{print_layout(layout)} is not legal for this model", wrong, ("dp1",))
    return resolve(layout, shape.num_hidden_layers)


def _value(tensor: Tensor) -> Tensor:
    return Tensor(tensor.name, tensor.shape, tensor.cuts, tensor.anchors, tensor.states[:1], tensor.unit)
