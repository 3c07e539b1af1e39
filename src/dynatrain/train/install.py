"""A new world: built on meta, described to the other ranks, later filled and bound in place of the old one."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import astuple
from typing import Any

import torch
from torch import nn

from dynatrain.execute.pieces import Piece, Pieces, misfits
from dynatrain.layout.layout import Layout
from dynatrain.plan.plan import Granule
from dynatrain.space.box import shape_of, whole
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue, State
from dynatrain.train.adopt import adopt_rest, shard_like, whole_storage
from dynatrain.train.agreement import SwitchAbortedError, exchange, on_every_rank
from dynatrain.train.equal import require_equal
from dynatrain.train.extra_state import check_extra_states, give_extra_states
from dynatrain.train.gradients import give
from dynatrain.train.groups import GroupPool, building
from dynatrain.train.hooks import built_hooks, carry_hooks, check_hooks
from dynatrain.train.live import (
    Described,
    Entry,
    UnplacedTensorError,
    describe,
    entries,
    find_slots,
    merge,
    reshard,
)
from dynatrain.train.module_settings import apply, refuse_meta, settings_of
from dynatrain.train.optimizer_settings import refuse_meta_tensors, set_optimizer
from dynatrain.train.optimizers.several import Several
from dynatrain.train.optimizers.state import scalar_device
from dynatrain.train.party import Party
from dynatrain.train.pending import Pending
from dynatrain.train.registered import check_holders, common, made_anew, snapshot
from dynatrain.train.retire import retire
from dynatrain.train.segments import SegmentError, held_shape
from dynatrain.train.states import Form, Leaf, UnknownStateError, forms, replace_leaves
from dynatrain.train.torch_private import local_tensor
from dynatrain.train.world import GRAD, World, as_parts, carry_groups


def make_world(party: Party, groups: GroupPool, layout: Layout, *, on_meta: bool) -> World:
    """Run the user's build for ``layout`` over a mesh of ``groups``. Allocates no state when ``on_meta``."""
    mesh = groups.mesh(layout, party.device.type)
    with building(groups, layout, party.device.type), torch.device("meta") if on_meta else nullcontext():
        model, optimizer = party.build(mesh, layout)
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = Several(optimizer or ())
    parts = as_parts(model)
    found = entries(parts, party.names)
    find_slots(found, party.segments, layout, party.rank)
    own = {id(entry.value) for entry in found.values()}
    foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise UnplacedTensorError(
            f"build returned an optimizer over {foreign} parameter(s) that its model does not have"
        )
    if on_meta:
        refuse_meta(parts, found)
        refuse_meta_tensors(optimizer)
    pending = Pending(parts, optimizer)
    hooks = built_hooks(parts, optimizer)
    built = settings_of(parts, found, party.names)
    return World(
        layout, mesh, parts, optimizer, found, built_hooks=hooks, pending=pending, rule=party.names, built=built
    )


def report(world: World, states: Mapping[str, tuple[State, ...]], rank: int) -> list[Any]:
    """This rank's tensors, as plain JSON values for the other ranks."""
    return [
        [d.name, d.shape, d.cuts, [astuple(s) for s in d.states], d.stage, d.spans, d.along, d.within]
        for d in describe(world.found, states, world.layout, rank)
    ]


def values_alone(world: World) -> dict[str, tuple[State, ...]]:
    """The states of a world that was built on meta: it has no optimizer state and no registered objects yet."""
    return {
        name: (State(entry.kind, str(entry.value.dtype).removeprefix("torch.")),) for name, entry in world.found.items()
    }


def read_reports(reports: list[Any], layout: Layout) -> tuple[Catalogue, Ownership]:
    """The whole job from all ranks' :func:`report`."""
    described = [
        [
            Described(
                name,
                tuple(shape),
                tuple((a, d) for a, d in cuts),
                tuple(map(_state, states)),
                stage,
                tuple((start, stop, local, room) for start, stop, local, room in spans),
                along,
                within,
            )
            for name, shape, cuts, states, stage, spans, along, within in one
        ]
        for one in reports
    ]
    return merge(described, layout)


def _state(fields: list[Any]) -> State:
    name, dtype, scalar, reduced, block = fields
    return State(name, dtype, scalar, tuple(reduced), block)


def survey(party: Party, world: World, topic: str) -> None:
    """Agree on the whole job with all ranks and write it into ``world``: its catalogue and ownership.

    Raises:
        UnplacedTensorError, UnknownStateError, SegmentError, StartRefusedError: on every rank, also where one alone
            has what cannot be switched.
    """

    def own() -> list[Any]:
        kept = [[state, *astuple(form)] for state, form in forms(world.object_leaves(), world.found).items()]
        unused = sorted(party.segments.unused(world.found))
        return [report(world, world.states(), party.rank), common(world), kept, unused]

    payload = on_every_rank(party.board, f"{topic}/own", party.rank, own, timeout=party.deadline)
    told = exchange(party.board, topic, party.rank, payload=payload, timeout=party.deadline).in_order()
    on_every_rank(
        party.board, f"{topic}/read", party.rank, lambda: _write_down(party, world, told), timeout=party.deadline
    )


def _write_down(party: Party, world: World, told: list[Any]) -> None:
    require_equal([facts for _, facts, _, _ in told])
    world.catalogue, world.ownership = read_reports([tensors for tensors, _, _, _ in told], world.layout)
    world.forms = _merged([kept for _, _, kept, _ in told])
    if unused := set.intersection(*(set(keys) for _, _, _, keys in told)):
        raise SegmentError(f"no tensor has {', '.join(sorted(unused))} in its name, which is declared of it")
    if wrong := misfits(world.pieces(party.rank, party.device), world.catalogue):
        raise UnplacedTensorError("; ".join(wrong))


def _merged(told: list[Any]) -> dict[str, Form]:
    """The forms that any rank knows; a form is that of the ranks whose names and shards can tell."""
    result: dict[str, Form] = {}
    for state, label, inside, prefix, canonical, plain in (form for kept in told for form in kept):
        seen = result.get(state)
        result[state] = Form(
            label, tuple(inside), prefix, canonical or bool(seen and seen.canonical), plain or bool(seen and seen.plain)
        )
    return result


def check_carried(world: World, target: Layout) -> None:
    """Refuse a switch that would leave something behind: an unregistered scheduler, extra state, a hook.

    Raises:
        UnknownStateError, UnknownHookError: by name.
    """
    check_holders(world)
    staged = max(world.layout.size("pp"), target.size("pp")) > 1
    check_extra_states(world.owners, staged=staged)
    check_hooks(world.parts, world.optimizer, world.found, world.built_hooks, staged=staged)


def check_tensors(party: Party, world: World) -> None:
    """Refuse tensors that the model has now and had not when it was built. Shards must not be gathered.

    Raises:
        UnknownStateError: by name.
    """
    now = entries(world.parts, party.names)
    known = {id(entry.value) for entry in world.found.values()}
    if late := [name for name, entry in now.items() if id(entry.value) not in known]:
        raise UnknownStateError(
            f"{', '.join(sorted(late))}: added or replaced after build, so build would make the next layout without; "
            "make it in build"
        )


def other_states(world: World, catalogue: Catalogue) -> list[str]:
    """The tensors of ``world`` whose states are now others than the catalogue's."""
    now, planned = world.states(), {tensor.name: tensor.states for tensor in catalogue}
    return sorted(name for name, (entry, _) in world.where.items() if planned.get(name) != now[entry])


def match_catalogue(old: World, catalogue: Catalogue) -> list[str]:
    """Why the tensors of a newly built model are not those of the old one; empty where they are."""
    was = {tensor.name: tensor for tensor in old.catalogue}
    now = {tensor.name: tensor for tensor in catalogue}
    problems = [f"build no longer makes {name}" for name in was.keys() - now.keys()]
    problems += [f"build makes {name}, which the old model has not" for name in now.keys() - was.keys()]
    for name in was.keys() & now.keys():
        for what, one, other in (
            ("shape", was[name].shape, now[name].shape),
            ("dtype", was[name].states[0].dtype, now[name].states[0].dtype),
        ):
            if one != other:
                problems.append(f"build makes {name} with {what} {other}, the old model has {one}")
    return sorted(problems)


Shared = dict[tuple[str, str], torch.Tensor]
"""New storage of fused and padded tensors, by the live tensor's name and the state's."""


def allocate(party: Party, old: World, new: World, granule: Granule, shared: Shared) -> Piece | None:
    """This rank's new piece of a granule; None where it will own none.

    Its storage is its own, padded as FSDP2 pads; or it lies in that of a fused tensor, which its first segment brings.
    """
    tensor, state = old.catalogue[granule[0]], old.catalogue[granule[0]].states[granule[1]]
    if tensor.name not in new.where:
        return None
    name, slot = new.where[tensor.name]
    entry = new.found[name]
    assert new.ownership is not None
    dtype = getattr(torch, state.dtype)
    box = new.ownership.state_box(tensor, state, party.rank)
    assert box is not None
    stored = entry.stored * dtype.itemsize if state.name == "param" else 0
    if slot is None or state.scalar:
        return Piece(party.memory.allocate(shape_of(box), dtype, stored), box)
    if (name, state.name) not in shared:
        held = held_shape(entry.slots, shape_of(box), state)
        stored = stored or math.prod(_local_shape(entry, state)) * dtype.itemsize
        shared[name, state.name] = party.memory.allocate(held, dtype, stored)
    return Piece(slot.view(shared[name, state.name], state, shape_of(box)), box)


def bind(party: Party, old: World, new: World, pieces: Pieces) -> None:
    """Put the arrived pieces into the new modules, optimizer and registered objects.

    Args:
        party: this rank.
        old: the world that still holds.
        new: built on meta, with storage or without; mutated.
        pieces: of the new ownership, filled.
    """
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for (index, number), piece in pieces.items():
        tensor = new.catalogue[index]
        name, slot = new.where[tensor.name]
        if slot is None or slot.number == 0:
            state = tensor.states[number]
            shares = slot is not None and not state.scalar
            by_name.setdefault(name, {})[state.name] = _local(new.found[name], state, piece) if shares else piece.tensor
    flats = {name: whole_storage(by_name[name][entry.kind]) for name, entry in new.found.items()}
    new.found = adopt_rest(new.parts, new.found, flats, [new.optimizer])
    new.forms = old.forms
    _bind_optimizer(old, new, by_name)
    new.untouched = old.untouched
    new.gradients = {name: by_name[name][GRAD] for name in new.found if GRAD in by_name[name]}
    give(new, new.gradients)
    refuse_meta(new.parts, {})  # also what a list has kept of parameters, whose places others have taken
    apply(new.parts, new.found, new.rule, new.built, new.changed)
    set_optimizer(new.optimizer, new.built_optimizer, new.changed)
    give_extra_states(new.owners, new.given)
    _bind_objects(party, old, new, by_name)
    carry_hooks(old, new)


def _local(entry: Entry, state: State, piece: Piece) -> torch.Tensor:
    """All of this rank's rows in the storage of a fused or padded tensor, of which ``piece`` is one state's first."""
    shape = _local_shape(entry, state)
    return whole_storage(piece.tensor)[: math.prod(shape)].view(shape)


def _local_shape(entry: Entry, state: State) -> tuple[int, ...]:
    """Shape of a state of a live tensor on this rank, rows that a padded vocabulary adds included."""
    return shape_of(state.box(whole(local_tensor(entry.value).shape), entry.value.shape))


def _bind_optimizer(old: World, new: World, by_name: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    # By the catalogue, not by what this rank's old optimizer held: it may have had none of this kind.
    others = {*old.forms, GRAD}
    kept = {
        new.where[tensor.name][0]: [one for one in tensor.states[1:] if one.name not in others]
        for tensor in new.catalogue
        if tensor.name in new.where
    }
    names = [{id(entry.value): name for name, entry in world.found.items()} for world in (old, new)]
    carry_groups(old.optimizer, new.optimizer, *names)
    group_of = {id(param): group for group in new.optimizer.param_groups for param in group["params"]}
    for name, entry in new.found.items():
        group = group_of.get(id(entry.value), {})
        state = {one.name: _bound(entry.value, one, by_name[name][one.name], group) for one in kept[name]}
        if state:
            new.optimizer.state[entry.value] = state


def _bound(param: torch.Tensor, state: State, value: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """An arrived piece as the optimizer holds it: see :func:`dynatrain.train.optimizers.state.blank`.

    A tensor object of its own: when the state is retired, the piece must stay usable, whose memory is given back later.
    """
    if state.like_tensor:
        return shard_like(param, value.flatten())
    return value.to(scalar_device(group, param)).detach() if state.scalar else value.detach()


def _bind_objects(party: Party, old: World, new: World, by_name: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    held = old.object_leaves()
    made = made_anew({label: party.factories[label] for label in old.objects if label in party.factories}, old, new)
    for label, thing in old.objects.items():
        if label in party.factories:
            new.objects[label] = made[label]
            new.objects[label].load_state_dict(snapshot(thing.state_dict(), ()))
        else:
            new.objects[label] = thing
            arrived = _new_leaves(label, new, by_name)
            thing.load_state_dict(replace_leaves(thing.state_dict(), held[label], arrived))
    # A scheduler's constructor writes learning rates; the old ones stand.
    names = [{id(entry.value): name for name, entry in world.found.items()} for world in (old, new)]
    carry_groups(old.optimizer, new.optimizer, *names)


def _new_leaves(label: str, new: World, by_name: Mapping[str, Mapping[str, torch.Tensor]]) -> list[Leaf]:
    """The leaves of one object after the switch, in the form that they had before."""
    made = []
    for name, entry in new.found.items():
        for state, form in new.forms.items():
            value = by_name[name].get(state)
            if form.label == label and value is not None:
                full = shard_like(entry.value, value.flatten())
                kept = (local_tensor(full) if form.plain else full).detach()
                spelled = name if form.canonical else _path(entry)
                made.append(Leaf(label, form.inside, form.prefix + spelled, name, spelled, kept))
    return made


def _path(entry: Entry) -> str:
    return entry.paths[0][1]


def remember(party: Party, world: World) -> dict[str, Any]:
    """What the registered objects hold, for :func:`unbind`.

    The tensors that a switch moves are kept as they are, because nothing writes the old ones; all else is copied: an
    object may hand out what it goes on to write.
    """
    held = world.object_leaves()
    return {
        label: snapshot(thing.state_dict(), held.get(label, ()))
        for label, thing in world.objects.items()
        if label not in party.factories
    }


def unbind(old: World, before: Mapping[str, Any]) -> None:
    """Give the registered objects back what :func:`remember` found."""
    for label, state in before.items():
        old.objects[label].load_state_dict(state)


def quiesce(world: World) -> None:
    """Leave shards alone: drop gathered parameters and consumed gradients."""
    for part in world.parts:
        reshard(part)
    for entry in world.found.values():
        if isinstance(entry.value, nn.Parameter):
            entry.value.grad = None


def refuse_pinned(world: World, pieces: Pieces) -> None:
    """Refuse pieces whose memory cannot be given up, which ``tight`` has to do.

    Raises:
        SwitchAbortedError: by name.
    """
    if pinned := sorted({world.catalogue[tensor].name for (tensor, _), piece in pieces.items() if piece.pinned}):
        raise SwitchAbortedError(
            f"tight mode gives storage up, and that of {', '.join(pinned)} is shared with numpy or another process "
            "(Tensor.numpy(), share_memory_()): give those a clone, or use mode keep"
        )


def leaf_values(world: World) -> dict[str, torch.Tensor]:
    """What registered objects hold of the model's tensors in this layout, by name for people."""
    held = (leaf for found in world.object_leaves().values() for leaf in found)
    return {f"{leaf.state} of {leaf.tensor}": leaf.value for leaf in held}


def retire_world(party: Party, world: World, leaves: Mapping[str, torch.Tensor], why: str) -> None:
    """Make every use of a world's handles and :func:`leaf_values` fail, and say ``why``; after its memory is gone."""
    made = {label: thing for label, thing in world.objects.items() if label in party.factories}
    retire(world.parts, world.optimizer, made, world.found, leaves, why)
