"""The first world of a job: built, filled, and joined by the objects that the user registers."""

from collections.abc import Callable
from typing import Any

import torch

from dynatrain.execute.pages import mapped_apart
from dynatrain.execute.pieces import Pool
from dynatrain.layout.layout import Layout
from dynatrain.train.install import check_carried, make_world
from dynatrain.train.party import Party
from dynatrain.train.registered import try_out
from dynatrain.train.states import UnknownStateError, create_optimizer_state
from dynatrain.train.world import World

Initial = Callable[[World, Pool], None]
"""Fills a first world that ``build`` made on meta: gives every tensor of it its storage and values."""


def first_world(party: Party, layout: Layout, initial: Initial | None) -> World:
    """Build the world in which the job begins, with the state that the optimizer's first step would create.

    Raises:
        UnplacedTensorError, UnknownStateError, UnknownHookError: what could not be switched, by name.
    """
    world = make_world(party, party.groups, layout, on_meta=initial is not None)
    with mapped_apart():
        if initial is not None:
            initial(world, party.memory)
        create_optimizer_state(world.optimizer)
    _refuse_without_master(world)
    check_carried(world, layout)
    return world


def _refuse_without_master(world: World) -> None:
    """Refuse parameters stored in 16 bits: no optimizer known here keeps a master of them.

    Raises:
        UnknownStateError: all of them, by name.
    """
    short = [
        f"{name} ({entry.value.dtype})"
        for name, entry in world.found.items()
        if entry.value.requires_grad and entry.value.itemsize < 4
    ]
    if short:
        raise UnknownStateError(
            f"{', '.join(short)}: trained in 16 bits, and {type(world.optimizer).__name__} keeps no master copy. Build "
            "the model in float32 and compute in 16 bits: fully_shard(..., mp_policy=MixedPrecisionPolicy(...))"
        )


def join(party: Party, world: World, label: str, thing: Any) -> None:
    """Let a registered object, or the product of a factory, belong to ``world`` and the worlds after it.

    Raises:
        UnknownStateError: it could not be carried to another layout, by name.
    """
    if label in world.objects or "." in label:
        raise UnknownStateError(f"{label!r} cannot be a label here: it is taken, or has a dot in it")
    if isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
        raise UnknownStateError(
            f"{label}: a scheduler belongs to the optimizer of one layout; give a factory, lambda optimizer: ..."
        )
    if not hasattr(thing, "state_dict"):
        party.factories[label] = thing
        world.objects[label] = thing(world.optimizer)
    else:
        try_out(label, thing, world.found)
        world.objects[label] = thing
