"""Everything that one layout has bound on one rank: modules, optimizer, registered objects, and what they hold."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dynatrain.execute.pieces import Piece, Pieces
from dynatrain.layout.layout import Layout
from dynatrain.models.names import NameRule, strip_wrappers
from dynatrain.space.box import shape_of
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue, State
from dynatrain.train.argument import ArgumentError
from dynatrain.train.extra_state import Owner, owners
from dynatrain.train.live import Entry
from dynatrain.train.optimizer_settings import optimizer_settings
from dynatrain.train.optimizers.several import Several
from dynatrain.train.pending import Pending
from dynatrain.train.segments import Slot
from dynatrain.train.settings import Key, Settings
from dynatrain.train.states import Form, Leaf, catalogue_states, leaves, optimizer_states
from dynatrain.train.torch_private import local_tensor

Build = Callable[[DeviceMesh, Layout], tuple[Any, Any]]
"""``build(mesh, layout) -> (module or list of modules, optimizer or list of optimizers)``: the user's own
``parallelize`` and optimizer. Several optimizers over different parameters become one, ``sw.optimizer``; None is for
what is not trained, such as the reference of a policy.

Called under ``torch.device("meta")`` for every layout but the first, in a thread beside training: so it must make
modules and nothing else, and neither seed nor draw from the process-wide random streams then. Once at the start it is
called like that for the first layout, too, to see that it does not."""

MECHANICS = ("params", "foreach", "fused")
"""What a parameter group says of how to compute, which is the layout's business and is not carried."""

GRAD = "grad"
"""The state that is the gradient which a part of a step has accumulated: there while a switch inside the step is."""


@dataclass(slots=True)
class World:
    """One layout, bound.

    Attributes:
        layout: the layout.
        mesh: its device mesh, all axes.
        parts: the modules of this rank.
        optimizer: over their parameters.
        found: the tensors of ``parts`` by canonical name.
        objects: registered objects by label; shared with the world before and after where they are not factories.
        built_hooks: numbers of the hooks that ``build`` registered itself, and of ours.
        pending: whether gradients wait for an update.
        catalogue: all tensors of the job.
        ownership: who holds which box of them.
        forms: how registered objects keep each of their states.
        where: of each logical tensor, the entry of ``found`` that it lies in, and its slot where it has one.
        rule: of canonical names.
        built: what modules, parameters and FSDP units were set to right after ``build``.
        built_optimizer: likewise, of the optimizer's own attributes.
        changed: what the next world is to be set to otherwise than built, from the quiet of a switch on.
        given: extra state that waits for the modules, by name, from the move of a switch on.
        gradients: local pieces of accumulated gradients by canonical name, during a switch inside a step; else empty.
        untouched: names of those among them that no backward has touched: pieces of zeros, and None in ``.grad``.
    """

    layout: Layout
    mesh: DeviceMesh
    parts: list[nn.Module]
    optimizer: torch.optim.Optimizer
    found: dict[str, Entry]
    objects: dict[str, Any] = field(default_factory=dict)
    built_hooks: frozenset[int] = frozenset()
    pending: Pending = field(default_factory=lambda: Pending((), Several(())))
    catalogue: Catalogue = ()
    ownership: Ownership | None = None
    forms: dict[str, Form] = field(default_factory=dict)
    rule: NameRule = strip_wrappers
    built: Settings = field(default_factory=dict)
    changed: dict[Key, tuple[Any, Any]] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    untouched: frozenset[str] = frozenset()
    built_optimizer: Settings = field(init=False)
    where: dict[str, tuple[str, Slot | None]] = field(init=False)

    def __post_init__(self) -> None:
        self.built_optimizer = optimizer_settings(self.optimizer)
        self.where = {
            name: (entry.name, entry.slots[i] if entry.slots else None)
            for entry in self.found.values()
            for i, name in enumerate(entry.names)
        }

    @property
    def trains(self) -> bool:
        """Whether an optimizer updates anything on any rank, as far as ``build`` says."""
        return bool(self.optimizer.param_groups)

    @property
    def owners(self) -> list[Owner]:
        """The modules that have extra state now."""
        return owners(self.parts, self.rule)

    def object_leaves(self) -> dict[str, list[Leaf]]:
        """Parameter-shaped tensors inside each registered object."""
        return {
            label: leaves(label, thing.state_dict(), self.found)
            for label, thing in self.objects.items()
            if not is_scheduler(thing)
        }

    def states(self) -> dict[str, tuple[State, ...]]:
        """The states that this rank's tensors have now, by canonical name."""
        of_objects = [leaf for found in self.object_leaves().values() for leaf in found]
        found = catalogue_states(self.found, optimizer_states(self.optimizer, self.found), of_objects)
        for name, piece in self.gradients.items():
            found[name] += (State(GRAD, str(piece.dtype).removeprefix("torch.")),)
        return found

    def handles(self) -> dict[tuple[str, str], torch.Tensor]:
        """``{(tensor, state): live tensor}`` of what modules and the optimizer hold, as they hold it."""
        held: dict[tuple[str, str], torch.Tensor] = {}
        for name, entry in self.found.items():
            held[name, entry.kind] = entry.value
        for name, values in optimizer_states(self.optimizer, self.found).items():
            held |= {(name, state.name): value for state, value in values.items()}
        return held

    def values(self) -> dict[tuple[str, str], torch.Tensor]:
        """``{(tensor, state): local tensor}`` of everything this rank holds, read from the live objects."""
        held = self.handles()
        for found in self.object_leaves().values():
            held |= {(leaf.tensor, leaf.state): leaf.value for leaf in found}
        held |= {(name, GRAD): piece for name, piece in self.gradients.items()}
        return {key: local_tensor(value) for key, value in held.items()}

    def pieces(self, rank: int, device: torch.device) -> Pieces:
        """What this rank holds, as the plan numbers it."""
        assert self.ownership is not None
        held = self.values()
        found: Pieces = {}
        for index, tensor in enumerate(self.catalogue):
            if tensor.name not in self.where:
                continue
            name, slot = self.where[tensor.name]
            box = self.ownership.box(tensor, rank)
            assert box is not None
            for number, state in enumerate(tensor.states):
                value = held[name, state.name].to(device)
                piece_box = state.box(box, tensor.shape)
                shape = shape_of(piece_box)
                found[index, number] = Piece(
                    slot.view(value, state, shape) if slot else value.reshape(shape), piece_box
                )
        return found

    def write_back(self, pieces: Pieces) -> None:
        """Give the live objects the values of filled pieces that are copies: what lies elsewhere than pieces do."""
        held = self.values()
        for (index, number), piece in pieces.items():
            tensor = self.catalogue[index]
            name, slot = self.where[tensor.name]
            value = held[name, tensor.states[number].name]
            if (slot is None or slot.number == 0) and value.untyped_storage().data_ptr() != piece.storage.data_ptr():
                value.copy_(piece.tensor.reshape(value.shape))


def nothing(layout: Layout, mesh: DeviceMesh) -> World:
    """The world in which a rank of a crossing is not: no modules, no tensors.

    Args:
        layout: of that world.
        mesh: of the world in which it is.
    """
    return World(layout, mesh, [], Several([]), {})


def as_parts(model: Any) -> list[nn.Module]:
    """What ``build`` returned, as a list of modules."""
    return list(model) if isinstance(model, Sequence) else [model]


def is_scheduler(thing: object) -> bool:
    """Whether a registered object is a learning-rate scheduler, whose state is plain numbers."""
    return isinstance(thing, torch.optim.lr_scheduler.LRScheduler)


def carry_groups(
    old: torch.optim.Optimizer, new: torch.optim.Optimizer, old_names: Mapping[int, str], new_names: Mapping[int, str]
) -> None:
    """Give the new optimizer's groups the options of the old one's: learning rates, betas, what the user changed.

    Groups are matched by their place, which one ``build`` gives to all layouts; empty groups count. A parameter that
    this rank had before must be in the group of the same place.

    Args:
        old: has the options.
        new: gets them.
        old_names: canonical names by parameter identity.
        new_names: likewise, of the new parameters.

    Raises:
        ArgumentError: the groups are not the same.
    """
    if len(old.param_groups) != len(new.param_groups):
        raise ArgumentError(
            f"build made {len(new.param_groups)} parameter groups for the new layout and {len(old.param_groups)} "
            "for the old one; make the same groups in every layout, empty ones too"
        )
    place = {old_names[id(p)]: number for number, group in enumerate(old.param_groups) for p in group["params"]}
    for number, group in enumerate(new.param_groups):
        strangers = [new_names[id(p)] for p in group["params"] if place.get(new_names[id(p)], number) != number]
        if strangers:
            raise ArgumentError(
                f"build moved {', '.join(strangers)} to parameter group {number}; keep groups as they were"
            )
        group |= {key: value for key, value in old.param_groups[number].items() if key not in MECHANICS}
