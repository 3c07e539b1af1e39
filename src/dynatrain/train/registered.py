"""What a registered object must be able to do, tried at once and not at the first switch; and what must be equal.

A registered object's state has *leaves*, which belong to a parameter and are cut as it is, and the rest, which is
common: one value for the whole job, equal on all ranks.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dynatrain.train.equal import hash_of
from dynatrain.train.live import Entry
from dynatrain.train.optimizers.several import members
from dynatrain.train.states import Leaf, UnknownStateError, leaves, replace_leaves
from dynatrain.train.torch_private import local_tensor, scheduled
from dynatrain.train.world import MECHANICS, World, is_scheduler


def try_out(label: str, thing: Any, found: Mapping[str, Entry]) -> None:
    """Hand an object its own state, in tensors that it has not seen, and see that it takes all of it over.

    Args:
        label: its registered name.
        thing: the object; as it was on return.
        found: the model's tensors.

    Raises:
        UnknownStateError: it cannot take over what it gave out: with every reason.
    """
    state = thing.state_dict()
    held = leaves(label, state, found)
    others = [replace(leaf, value=leaf.value.clone()) for leaf in held]
    problems = []
    try:
        thing.load_state_dict(replace_leaves(snapshot(state, held), held, others))
        problems = _changes(label, held, thing, found)
        thing.load_state_dict(state)
    except UnknownStateError:
        raise
    except Exception as error:
        raise UnknownStateError(f"{label}: load_state_dict does not take its own state: {error}") from error
    if problems:
        raise UnknownStateError("; ".join(problems))


def _changes(label: str, held: Sequence[Leaf], thing: Any, found: Mapping[str, Entry]) -> list[str]:
    """What ``thing`` did wrong in taking over other leaves than ``held``."""
    before = {(*leaf.inside, leaf.key): leaf.value for leaf in held}
    after = {(*leaf.inside, leaf.key): leaf.value for leaf in leaves(label, thing.state_dict(), found)}
    problems = [
        f"{label}: load_state_dict {'dropped' if key in before else 'made up'} {'.'.join(key)}"
        for key in sorted(before.keys() ^ after.keys())
    ]
    problems += [
        f"{label}: load_state_dict copies {'.'.join(key)} into the tensor that it has, which cannot hold another "
        "layout's shard; let it keep the tensor that it is given"
        for key in sorted(before.keys() & after.keys())
        if _address(before[key]) == _address(after[key]) != 0
    ]
    return problems


def _address(value: torch.Tensor) -> int:
    return local_tensor(value).untyped_storage().data_ptr()


def snapshot(state: Mapping[str, Any], held: Sequence[Leaf]) -> dict[str, Any]:
    """A copy of a state dict whose leaves are the very tensors and of which nothing else is shared."""
    return copy.deepcopy(dict(state), {id(leaf.value): leaf.value for leaf in held})


def check_holders(world: World) -> None:
    """Refuse what hangs on the optimizer without being registered.

    Raises:
        UnknownStateError: a scheduler that would go on with the optimizer of an old layout.
    """
    if any(map(scheduled, members(world.optimizer))) and not any(map(is_scheduler, world.objects.values())):
        raise UnknownStateError(
            "a learning-rate scheduler hangs on the optimizer and is not registered: it would go on with the old "
            "optimizer. Give the Switcher a factory, state={'scheduler': lambda optimizer: ...}"
        )


def common(world: World) -> dict[str, str]:
    """A hash of each thing that must be equal on all ranks: objects' common state, optimizer options."""
    hashes = {}
    for label, thing in world.objects.items():
        state = thing.state_dict()
        held = () if is_scheduler(thing) else leaves(label, state, world.found)
        hashes[label] = hash_of(state, {id(leaf.value) for leaf in held})
    return _facts(hashes, world.optimizer.param_groups)


def common_of(states: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """As :func:`common`, of copies.

    Args:
        states: what each object holds in common, by label.
        groups: the optimizer's.
    """
    return _facts({label: hash_of(state) for label, state in states.items()}, groups)


def _facts(hashes: Mapping[str, str], groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    facts = {f"the common state of {label}": hashed for label, hashed in hashes.items()}
    for number, group in enumerate(groups):
        options = {key: value for key, value in group.items() if key not in MECHANICS}
        facts[f"the options of parameter group {number}"] = hash_of(options)
    return facts
