"""How an inference engine holds a model's weights: Hugging Face's names, some fused, cut by tp, in its own dtype.

An engine is a set of ranks like a run is one, so its layout is an ownership of the same logical tensors. What its own
tensors are beside that is a value here: which logical tensors lie in one of them, one behind the other along which dim,
and which way round. Each rank fuses what it holds: the rows of queries that it has, behind them its rows of keys.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from dynatrain.layout.form import LayoutError
from dynatrain.layout.layout import Layout
from dynatrain.layout.legality import problems
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import parse_layout, print_layout
from dynatrain.space.box import Box, volume
from dynatrain.space.decoder import DecoderShape, catalogue
from dynatrain.space.hf_config import ModelError
from dynatrain.space.hf_names import READ_DTYPES, file_parts
from dynatrain.space.ownership import Ownership, declared
from dynatrain.space.tensor import Catalogue, Tensor

FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
)
"""What vLLM and SGLang fuse in models of Llama's form, and in which order."""

_OWN_AXES = ("pp", "dp", "tp")
"""Axes that an engine has: stages, replicas, and parts of each matrix."""


@dataclass(frozen=True, slots=True)
class Component:
    """A logical tensor as it lies in one of the engine's.

    Attributes:
        tensor: its canonical name in the run.
        transposed: the engine has its two dims the other way round.
    """

    tensor: str
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class EngineTensor:
    """One tensor of the engine, under the name that the engine knows.

    Attributes:
        name: Hugging Face's, with the fused module's name where it is fused.
        components: one behind the other.
        dim: along which, of the engine's tensor.
    """

    name: str
    components: tuple[Component, ...]
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one rank of the engine has a component.

    Attributes:
        tensor: canonical name of the logical tensor.
        box: of it, that the rank holds.
        place: the same elements in the rank's own tensor.
        transposed: as of :class:`Component`.
    """

    tensor: str
    box: Box
    place: Box
    transposed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine's layout. Ranks count from 0, apart from the run's.

    Attributes:
        ownership: which rank has which box of which logical tensor.
        dtype: element type of all its weights, as torch prints it without its prefix.
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
            layout: of the engine, over ``pp``, ``dp`` (replicas) and ``tp``.
            held: the run's tensors, values first: under our names, or under Hugging Face's.
            dtype: of the engine's weights.
            fused: name of each fused module, and the modules in it, in their order.

        Raises:
            LayoutError: the text is no layout, or none for this model or an engine.
            ModelError: the run's tensors are not those of ``shape``, something cannot be fused, or the dtype is
                unknown; all of it, by name.
        """
        placed = _layout(shape, layout)
        own = {tensor.name: tensor for tensor in catalogue(shape, optimizer="")}
        placements = declared(tuple(own.values()), placed, shape.num_hidden_layers).placements
        known = _names(shape, own, {tensor.name for tensor in held})
        wrong = [] if dtype in READ_DTYPES else [f"dtype is {dtype!r}; one of {', '.join(READ_DTYPES)}"]
        if shape.experts:
            wrong.append("the model has experts, which engines fuse in ways of their own; only dense models are known")
        wrong += [f"the run has no tensor {name}" for name in sorted(own.keys() - known.values())]
        values = tuple(tensor for tensor in held if tensor.states[0].name != "buffer")
        wrong += [
            f"the run has {tensor.name} of shape {list(tensor.shape)}; an engine of this model has none such"
            for tensor in values
            if tensor.name not in known or own[known[tensor.name]].shape != tensor.shape
        ]
        tensors, unfused = _fused(_written(shape, known), fused)
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
            if box is None or not volume(box):
                continue
            sizes = [stop - start for start, stop in box]
            sizes = sizes[::-1] if component.transposed else sizes
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
            shapes = [by_name[one.tensor][:: -1 if one.transposed else 1] for one in tensor.components]
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
    if wrong := problems(layout, shape.limits()):
        raise LayoutError(f"{print_layout(layout)} is not legal for this model", wrong, ("dp1",))
    return resolve(layout, shape.num_hidden_layers)


def _names(shape: DecoderShape, own: Collection[str], held: Collection[str]) -> dict[str, str]:
    """Under which name the run has each tensor of ours: that itself, or the one that the files have for it."""
    found = {}
    for name, parts in file_parts(shape).items() if shape.experts is None else ():
        alone = len(parts) == 1 and not parts[0].transposed
        written = parts[0].tensor if alone else name
        if name in own and (seen := next((one for one in (name, written) if one in held), "")):
            found[seen] = name
    return found


def _written(shape: DecoderShape, known: Mapping[str, str]) -> dict[str, EngineTensor]:
    """The tensors as the files have them, by name: what they fuse is fused, what they transpose transposed."""
    parts = file_parts(shape) if shape.experts is None else {}
    order: dict[str, list[tuple[Box, Component]]] = {}
    for name, logical in known.items():
        (part,) = parts[logical]
        order.setdefault(part.tensor, []).append((part.file_box, Component(name, part.transposed)))
    found = {}
    for tensor, members in order.items():
        components = tuple(component for _, component in sorted(members, key=lambda member: member[0]))
        found[tensor] = EngineTensor(tensor, components, len(members[0][0]) - 1 if len(members) > 1 else 0)
    return found


def _fused(
    tensors: Mapping[str, EngineTensor], fused: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[EngineTensor, ...], list[str]]:
    """The tensors with the members of each fused module in one; and what that lacks."""
    into = {member: (name, members) for name, members in fused.items() for member in members}
    found: dict[str, EngineTensor] = {}
    wrong = []
    for name, tensor in tensors.items():
        owner, _, kind = name.rpartition(".")
        module, _, last = owner.rpartition(".")
        if last not in into:
            found[name] = tensor
            continue
        joined, members = into[last]
        wanted = [f"{module}.{member}.{kind}" for member in members]
        if lacking := [one for one in wanted if one not in tensors]:
            wrong.append(f"{name} is to be fused into {joined} with {', '.join(lacking)}, which the model has not")
            continue
        components = tuple(component for one in wanted for component in tensors[one].components)
        found.setdefault(f"{module}.{joined}.{kind}", EngineTensor(f"{module}.{joined}.{kind}", components))
    return tuple(found.values()), wrong


def _value(tensor: Tensor) -> Tensor:
    return Tensor(tensor.name, tensor.shape, tensor.cuts, tensor.anchors, tensor.states[:1], tensor.unit)
