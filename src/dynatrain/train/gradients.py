"""The gradient that a part of a step has accumulated: one more state of every trained tensor, while a switch moves it.

It is ``param.grad``, reduced, and so shaped and cut as its parameter. For the length of a switch inside a step it lies
in pieces: of the old world, so that an abort finds it, and of the new one, which the digests read. Training goes on
with a copy of the latter, since the rest of the step adds to it before the switch is decided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from dynatrain.space.tensor import Catalogue, State
from dynatrain.train.adopt import shard_like
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.party import Party
from dynatrain.train.states import UnknownStateError
from dynatrain.train.torch_private import local_tensor
from dynatrain.train.torch_private_fsdp import unreduced
from dynatrain.train.world import GRAD, World


def with_gradients(states: Mapping[str, tuple[State, ...]], world: World) -> dict[str, tuple[State, ...]]:
    """``states``, and the gradients of the tensors of ``world`` that are trained."""
    return {
        name: (*of, State(GRAD, of[0].dtype)) if world.found[name].value.requires_grad else of
        for name, of in states.items()
    }


def inside(world: World, told: Catalogue) -> World:
    """``world`` as it is inside a step: the same objects, and gradients among the states; ``told`` says of which."""
    last = {tensor.name: tensor.states[-1] for tensor in told}
    catalogue = tuple(
        replace(tensor, states=(*tensor.states, state))
        if (state := last.get(tensor.name)) and state.name == GRAD
        else tensor
        for tensor in world.catalogue
    )
    return replace(world, catalogue=catalogue, gradients={})


def take(party: Party, world: World) -> None:
    """Move this rank's gradients out of ``.grad`` into pieces of their own.

    A parameter that no backward has touched in this step so far has zeros for a piece, and is among ``untouched``.

    Raises:
        UnknownStateError: a gradient is not reduced; by name, and then none was moved.
    """
    entries = dict.fromkeys(
        world.where[tensor.name][0]
        for tensor in world.catalogue
        if tensor.states[-1].name == GRAD and tensor.name in world.where
    )
    trained = {name: world.found[name].value for name in entries}
    whole = set().union(*map(unreduced, world.parts))
    if waiting := [name for name, param in trained.items() if id(param) in whole]:
        raise UnknownStateError(
            f"{', '.join(waiting)}: the gradient after this part of the step is not reduced; a part ends with reduced "
            "gradients (FSDP2: set_requires_gradient_sync(True) for its last backward)"
        )
    world.untouched = frozenset(
        logical for name, param in trained.items() if param.grad is None for logical in world.found[name].names
    )
    for name, param in trained.items():
        local = local_tensor(param.detach() if param.grad is None else param.grad)
        piece = party.memory.allocate(tuple(local.shape), local.dtype)
        world.gradients[name] = piece.zero_() if param.grad is None else piece.copy_(local)
        param.grad = None  # FSDP2 reduces a unit's gradients into one storage, which goes with the last of them


def agree_untouched(world: World, told: Sequence[Sequence[str]]) -> None:
    """Write into ``world`` which gradients no backward has touched, on any rank.

    Args:
        world: of which :func:`take` has moved gradients.
        told: ``untouched`` of every rank.

    Raises:
        SwitchAbortedError: ranks that hold parts of one gradient do not agree; by name, on every rank alike.
    """
    assert world.ownership is not None
    untouched = frozenset().union(*told)
    problems = []
    for tensor in world.catalogue:
        if tensor.name in untouched:
            holders = [rank for rank in range(len(told)) if world.ownership.box(tensor, rank) is not None]
            if others := [rank for rank in holders if tensor.name not in told[rank]]:
                problems.append(
                    f"{tensor.name}: ranks {others} have a gradient after this part of the step, others none"
                )
    if problems:
        raise SwitchAbortedError("; ".join(problems))
    world.untouched = untouched


def give(world: World, pieces: Mapping[str, torch.Tensor]) -> None:
    """Let training go on in ``world`` from copies of ``pieces``, gradients by name."""
    for name, piece in pieces.items():
        entry = world.found[name]
        if not world.untouched.issuperset(entry.names):
            param = entry.value
            param.grad = shard_like(param, piece.flatten().clone())


def forget(party: Party, world: World) -> None:
    """Free the pieces: ``world`` has no gradients among its states any more."""
    for piece in world.gradients.values():
        party.memory.drop(piece)
    world.gradients, world.untouched = {}, frozenset()
    world.catalogue = tuple(
        replace(tensor, states=tensor.states[:-1]) if tensor.states[-1].name == GRAD else tensor
        for tensor in world.catalogue
    )
