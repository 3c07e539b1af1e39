"""The tensors of an inference engine by its own names: Hugging Face's, and those of what it fuses.

A layer's experts lie in one tensor of each projection in the run. An engine has them in stacks of its own, or apart,
each expert's matrices under names of their own, as the files have them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dynatrain.space.box import Box
from dynatrain.space.decoder import DecoderShape
from dynatrain.space.hf_names import file_parts

STACK = "experts."
"""What names of :data:`FUSED` begin with that stand for all experts of a layer in one tensor, [experts, out, in]."""

FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        f"{STACK}w13_weight": ("gate_proj", "up_proj"),
        f"{STACK}w2_weight": ("down_proj",),
    }
)
"""What vLLM and SGLang fuse in models of Llama's, Mixtral's and DeepSeek-V3's form, and in which order."""


@dataclass(frozen=True, slots=True)
class Component:
    """A logical tensor, or one expert of it, as it lies in one of the engine's.

    Attributes:
        tensor: its canonical name in the run.
        transposed: the engine has its two dims the other way round.
        expert: which one of a stack of experts lies apart, without the stack's dim; None for all of the tensor.
    """

    tensor: str
    transposed: bool = False
    expert: int | None = None

    def laid(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Sizes of a part of it, dim by dim, as the engine's tensor has them."""
        sizes = sizes if self.expert is None else sizes[1:]
        return sizes[::-1] if self.transposed else sizes


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


def run_names(shape: DecoderShape, own: Collection[str], held: Collection[str]) -> dict[str, str]:
    """Our name of each tensor by the name that the run has for it: that itself, or the one of the files or modules.

    Args:
        shape: of the model.
        own: names of the tensors of such a model, as we have them.
        held: names of the run's tensors.
    """
    found = {}
    for name, parts in file_parts(shape).items():
        alone = len(parts) == 1 and not parts[0].transposed
        known = (name, parts[0].tensor if alone else name, f"model.{name}")
        if name in own and (seen := next((one for one in known if one in held), "")):
            found[seen] = name
    return found


def engine_tensors(
    shape: DecoderShape, known: Mapping[str, str], fused: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[EngineTensor, ...], list[str]]:
    """What an engine has of a model, and what the modules lack that it is to fuse, a sentence each.

    Args:
        shape: of the model.
        known: as :func:`run_names` gives it.
        fused: name of each fused module, and the modules in it, in their order; see :data:`STACK`.
    """
    stacks, lacking = _stacked(shape, known, {name: of for name, of in fused.items() if name.startswith(STACK)})
    inside = {component.tensor for tensor in stacks for component in tensor.components}
    written = _written(shape, {name: logical for name, logical in known.items() if name not in inside})
    tensors, more = _fused(written, {name: of for name, of in fused.items() if not name.startswith(STACK)})
    return (*tensors, *stacks), lacking + more


def _stacked(
    shape: DecoderShape, known: Mapping[str, str], fused: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[EngineTensor, ...], list[str]]:
    """The tensors that have all experts of a layer in one: of each expert one module behind the other."""
    parts = file_parts(shape)
    seen = {logical: name for name, logical in known.items()}
    into = {member: (name, members) for name, members in fused.items() for member in members}
    found: dict[str, EngineTensor] = {}
    wrong: list[str] = []
    for logical in seen:
        module, _, last = logical.rpartition(".")
        if not module.endswith(".experts") or last not in into:
            continue
        joined, members = into[last]
        wanted = [f"{module}.{member}" for member in members]
        layer, _, _ = parts[logical][0].tensor.partition(f".{STACK}")
        if not _lacks(logical, joined, wanted, seen, wrong):
            components = tuple(Component(seen[one]) for one in wanted)
            found.setdefault(f"{layer}.{joined}", EngineTensor(f"{layer}.{joined}", components, 1))
    return tuple(found.values()), wrong


def _written(shape: DecoderShape, known: Mapping[str, str]) -> dict[str, EngineTensor]:
    """The tensors as the files have them, by name: fused, transposed, and an expert apart where they have it so."""
    parts = file_parts(shape)
    order: dict[str, list[tuple[Box, Component]]] = {}
    for name, logical in known.items():
        for part in parts[logical]:
            expert = part.box[0][0] if len(part.file_box) < len(part.box) else None
            order.setdefault(part.tensor, []).append((part.file_box, Component(name, part.transposed, expert)))
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
    wrong: list[str] = []
    for name, tensor in tensors.items():
        owner, _, kind = name.rpartition(".")
        module, _, last = owner.rpartition(".")
        if last not in into:
            found[name] = tensor
            continue
        joined, members = into[last]
        wanted = [f"{module}.{member}.{kind}" for member in members]
        if not _lacks(name, joined, wanted, tensors, wrong):
            components = tuple(component for one in wanted for component in tensors[one].components)
            found.setdefault(f"{module}.{joined}.{kind}", EngineTensor(f"{module}.{joined}.{kind}", components))
    return tuple(found.values()), wrong


def _lacks(name: str, joined: str, wanted: Iterable[str], there: Collection[str], wrong: list[str]) -> bool:
    """Whether a fused module has not all that it is made of; told to ``wrong``."""
    lacking = [one for one in wanted if one not in there]
    if lacking:
        wrong.append(f"{name} is to be fused into {joined} with {', '.join(lacking)}, which the model has not")
    return bool(lacking)
