"""What a job is beside its tensors, at a step edge: written by a save, and told to the newcomers of a crossing."""

import base64
import copy
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from dynatrain.layout.text import print_layout
from dynatrain.observe.checkpoints import SCHEMA
from dynatrain.train.extra_state import unreadable
from dynatrain.train.optimizer_settings import Kept, kept_by, take_kept, unlike_optimizers
from dynatrain.train.party import Party
from dynatrain.train.registered import snapshot
from dynatrain.train.states import Leaf, leaves, replace_leaves
from dynatrain.train.streams import Streams
from dynatrain.train.world import MECHANICS, World, is_scheduler

OPTIMIZERS = "optimizers"
"""Key of what optimizers keep on themselves, in a checkpoint's table; older ones have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One rank's.

    Attributes:
        step: the next step.
        layout: as text.
        common: what registered objects hold in common, by label.
        groups: options of the optimizer's parameter groups; ``params`` are names of this rank's.
        optimizers: plain attributes of the optimizer itself that were set since build.
        streams: random streams of this rank.
    """

    step: int
    layout: str
    common: dict[str, Any]
    groups: list[dict[str, Any]]
    optimizers: Kept
    streams: dict[str, Any]

    @classmethod
    def of(cls, party: Party, world: World, step: int) -> Self:
        """Copies of all of it."""
        groups = [
            {key: value for key, value in group.items() if key != "params"} | {"params": names}
            for group, names in zip(world.optimizer.param_groups, group_names(world), strict=True)
        ]
        return cls(
            step=step,
            layout=print_layout(world.layout),
            common={label: _common(label, thing, world) for label, thing in world.objects.items()},
            groups=copy.deepcopy(groups),
            optimizers=kept_by(world.built_optimizer, world.optimizer),
            streams=Streams.read(party.device).state(),
        )

    def table(self) -> dict[str, Any]:
        """What is equal on all ranks, as a checkpoint has it; parameter groups stand beside it."""
        head = {"schema": SCHEMA, "step": self.step, "layout": self.layout}
        return head | {"objects": self.common, OPTIMIZERS: self.optimizers}

    def require_readable(self) -> None:
        """Refuse common state that could be written and not read back: reading runs no code of a pickle's.

        Raises:
            ValueError: whose it is.
        """
        for label, state in self.common.items():
            if why := unreadable(state):
                raise ValueError(f"the state of {label} could not be read back; {why}")

    def to_text(self) -> str:
        """As text; :meth:`from_text` reads it."""
        return base64.b64encode(_written([self.table(), self.groups, self.streams])).decode()

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what :meth:`to_text` wrote."""
        table, groups, streams = _read(base64.b64decode(text))
        return cls(
            step=table["step"],
            layout=table["layout"],
            common=table["objects"],
            groups=groups,
            optimizers=table[OPTIMIZERS],
            streams=streams,
        )


def group_names(world: World) -> list[list[str]]:
    """The names of this rank's parameters in each of the optimizer's groups."""
    names = {id(entry.value): entry.names for entry in world.found.values()}
    return [[name for p in group["params"] for name in names[id(p)]] for group in world.optimizer.param_groups]


def take(world: World, objects: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], optimizers: Kept) -> None:
    """Give a world whose tensors were filled in place what an account says of the rest.

    Args:
        world: its objects and optimizer groups are written.
        objects: common state by label.
        groups: options of the groups here, in their order; those of how to compute are the layout's own business, and
            stay.
        optimizers: plain attributes of the optimizer; others that were set since build are again as that made them.
    """
    held = world.object_leaves()
    for label, thing in world.objects.items():
        live: list[Leaf] = held.get(label, [])
        thing.load_state_dict(replace_leaves(objects[label], [], live))
    for group, told in zip(world.optimizer.param_groups, groups, strict=True):
        group |= {key: value for key, value in told.items() if key not in MECHANICS}
    take_kept(world.built_optimizer, world.optimizer, optimizers)


def mismatches(world: World, objects: Mapping[str, Any], optimizers: Kept) -> tuple[str, ...]:
    """Why registered objects and optimizers are not those that ``world`` has; empty where they are."""
    told, here = objects.keys(), world.objects.keys()
    problems = [f"it has {label}, which is not registered here" for label in sorted(told - here)]
    problems += [f"it has no {label}, which is registered here" for label in sorted(here - told)]
    return (*problems, *unlike_optimizers(world.optimizer, optimizers))


def displaced(world: World, groups: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Why parameter groups that a rank of the same job tells are not those of ``world``, place by place."""
    here = group_names(world)
    if len(groups) != len(here):
        return (f"it has {len(groups)} parameter groups, the optimizer here {len(here)}",)
    place = {name: number for number, group in enumerate(groups) for name in group["params"]}
    return tuple(
        f"{name} is in its parameter group {place[name]} and here in group {number}"
        for number, names in enumerate(here)
        for name in names
        if place.get(name, number) != number
    )


def _common(label: str, thing: Any, world: World) -> dict[str, Any]:
    """A copy of what a registered object holds beside its leaves."""
    state = thing.state_dict()
    held = [] if is_scheduler(thing) else leaves(label, state, world.found)
    return snapshot(replace_leaves(state, held, []), ())


def _written(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _read(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
