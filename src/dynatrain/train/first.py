"""The first world of a job: built, filled, and joined by the objects that the user registers."""

from collections.abc import Callable
from typing import Any

import torch

from dynatrain.execute.pages import mapped_apart
from dynatrain.execute.pieces import Pool
from dynatrain.layout.layout import Layout
from dynatrain.train.adopt import adopt
from dynatrain.train.agreement import on_every_rank
from dynatrain.train.groups import GroupPool
from dynatrain.train.install import check_carried, make_world, survey
from dynatrain.train.party import Party
from dynatrain.train.registered import require_made_anew, try_out
from dynatrain.train.states import UnknownStateError, create_optimizer_state, leaves
from dynatrain.train.streams import Streams
from dynatrain.train.targets import require_reduced
from dynatrain.train.torch_private import set_for_a_while
from dynatrain.train.world import GRAD, World, is_scheduler

Initial = Callable[[World, Pool], None]
"""Fills a first world that ``build`` made on meta: gives every tensor of it its storage and values."""


def first_world(party: Party, groups: GroupPool, layout: Layout, initial: Initial | None) -> World:
    """Build the world in which this process begins, with the state that the optimizer's first step would create.

    Raises:
        UnplacedTensorError, UnknownStateError, UnknownHookError: what could not be switched, by name.
    """
    try:
        world = _built_on_meta(party, groups, layout)
    except ValueError:  # of ours, and has names
        raise
    except Exception as error:
        if initial is None:  # a wrapper that cannot be built there is known by name where it can be built
            check_carried(make_world(party, groups, layout, on_meta=False), layout)
        raise UnknownStateError(
            f"build fails on meta, where every later layout is built: {type(error).__name__}: {error}. Keep what needs "
            "values out of it, or behind a look whether torch.empty(0) is on meta"
        ) from error
    if initial is None:  # then that was a rehearsal
        world = make_world(party, groups, layout, on_meta=False)
    with mapped_apart():
        if initial is not None:
            initial(world, party.memory)
        create_optimizer_state(world.optimizer)
    _refuse_without_master(world)
    require_reduced(party, world)
    check_carried(world, layout)
    return world


def _built_on_meta(party: Party, groups: GroupPool, layout: Layout) -> World:
    """As every later layout is built; where the first is not, a rehearsal, which costs one build without memory.

    Raises:
        UnknownStateError: it seeds, draws, or sets for a while what is one for all threads: training would feel it.
    """
    before = Streams.read(party.device)
    elsewhere = before.of_new_rank(-1, 0, party.device)  # where nobody seeds them to, so that any seed is seen
    elsewhere.restore(party.device)
    try:
        with set_for_a_while() as for_a_while:
            world = make_world(party, groups, layout, on_meta=True)
        moved = not Streams.read(party.device).same(elsewhere)
    finally:
        before.restore(party.device)
    if moved:
        raise UnknownStateError(
            "build seeds, or draws from, the process-wide random streams on meta: every later layout is built beside "
            "training, which draws from the same. Seed before Switcher(...), or in build where torch.empty(0) is not "
            "on meta, or let initial do it"
        )
    if for_a_while:
        raise UnknownStateError(
            f"build sets torch's {', '.join(dict.fromkeys(for_a_while))} for a while: that is one for all threads, and "
            "every later layout is built beside training, which would compute with it meanwhile. Set it before "
            "Switcher(...), or give a dtype to what is built: AutoModel.from_config(config, "
            "dtype=torch.get_default_dtype()), and .to(...) behind it for what is frozen in 16 bits"
        )
    return world


def blank(world: World, memory: Pool) -> None:
    """The :data:`Initial` of a newcomer, whose values come from the run: storage without values."""
    flats = {
        name: torch.zeros(entry.stored, dtype=entry.value.dtype, device=memory.device)
        for name, entry in world.found.items()
    }
    world.found = adopt(world.parts, world.found, flats, [world.optimizer])


def _refuse_without_master(world: World) -> None:
    """Refuse parameters stored in 16 bits: no optimizer known here keeps a master of them.

    Raises:
        UnknownStateError: all of them, by name.
    """
    short = [
        f"{name} ({entry.value.dtype})"
        for name, entry in world.found.items()
        if entry.value.requires_grad and entry.value.itemsize < 4 and world.trains
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
    taken = {"param", "buffer", GRAD, *world.objects, *(key for held in world.optimizer.state.values() for key in held)}
    if label in taken or "." in label:
        raise UnknownStateError(f"{label!r} cannot be a label here: it is taken, or has a dot in it")
    if isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
        raise UnknownStateError(
            f"{label}: a scheduler belongs to the optimizer of one layout; give a factory, lambda optimizer: ..."
        )
    if isinstance(thing, type) or not hasattr(thing, "state_dict"):
        world.objects[label] = _made(label, thing, world)
        party.factories[label] = thing
    else:
        try_out(label, thing, world)
        world.objects[label] = thing


def register(party: Party, world: World, label: str, thing: Any) -> None:
    """As :func:`join`, of what comes when all ranks train: they agree on it, and its memory is counted."""
    on_every_rank(
        party.board,
        f"join/{label}",
        party.rank,
        lambda: join(party, world, label, thing),
        timeout=party.deadline,
    )
    survey(party, world, f"survey/{label}")
    hold(party, world, label)


def hold(party: Party, world: World, label: str = "") -> None:
    """Count the memory of a first world, or of what was registered under ``label``.

    Raises:
        PromiseError, StartRefusedError: the jobs of a process hold more than was promised; on every rank.
    """
    pieces = [
        piece
        for granule, piece in world.pieces(party.rank, party.device).items()
        if not label or world.catalogue[granule[0]].states[granule[1]].name.partition(".")[0] == label
    ]
    if party.memory.promise is None:
        party.memory.hold(pieces)
    else:
        topic = f"hold/{label or 'all'}"
        on_every_rank(party.board, topic, party.rank, lambda: party.memory.hold(pieces), timeout=party.deadline)


def _made(label: str, factory: Any, world: World) -> Any:
    """The product of a factory.

    Raises:
        UnknownStateError: it is no factory of something that carries numbers alone.
    """
    if not callable(factory):
        raise UnknownStateError(
            f"{label}: {type(factory).__name__} is neither an object with state_dict and load_state_dict nor a factory "
            "that makes one from the optimizer"
        )
    try:
        product = factory(world.optimizer)
    except Exception as error:
        raise UnknownStateError(f"{label}: the factory fails on the optimizer: {error}") from error
    if isinstance(product, type) or not (hasattr(product, "state_dict") and hasattr(product, "load_state_dict")):
        raise UnknownStateError(f"{label}: the factory made {type(product).__name__}, without state_dict and its like")
    if not is_scheduler(product) and leaves(label, product.state_dict(), world.found):
        raise UnknownStateError(
            f"{label}: the factory's product holds tensors of parameters, which it would make anew in each layout; "
            "give the object itself"
        )
    require_made_anew(label, product, world)
    return product
