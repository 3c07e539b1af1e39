"""What a registered object must be able to do, tried at once and not at the first switch; and what must be equal.

A registered object's state has *leaves*, which belong to a parameter and are cut as it is, and the rest, which is
common: one value for the whole job, equal on all ranks.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dynatrain.train.belongings import GROUP, MODULE, OPTIMIZER, Belongings, held, told
from dynatrain.train.equal import hash_of
from dynatrain.train.live import Entry
from dynatrain.train.optimizers.several import members
from dynatrain.train.states import Leaf, UnknownStateError, leaves, replace_leaves
from dynatrain.train.torch_private import local_tensor, scheduled
from dynatrain.train.world import MECHANICS, World, is_scheduler


def try_out(label: str, thing: Any, world: World) -> None:
    """Hand an object its own state, in tensors that it has not seen, and see that it takes all of it over.

    Args:
        label: its registered name.
        thing: the object; as it was on return.
        world: the present one.

    Raises:
        UnknownStateError: it cannot take over what it gave out, or holds what no switch would put others in the place
            of: with every reason.
    """
    state, found = thing.state_dict(), world.found
    belongings = Belongings(world, views=True)
    if there := _but_tensors(held(state, belongings)):
        raise UnknownStateError(f"{label}: its state dict has {told(there)}, of which each layout has another")
    kept = leaves(label, state, found)
    others = [replace(leaf, value=leaf.value.clone()) for leaf in kept]
    problems = []
    try:
        thing.load_state_dict(replace_leaves(snapshot(state, kept), kept, others))
        problems = _changes(label, kept, thing, found)
        problems = problems or _kept(label, held(thing, belongings))
        thing.load_state_dict(state)
    except UnknownStateError:
        raise
    except Exception as error:
        raise UnknownStateError(f"{label}: load_state_dict does not take its own state: {error}") from error
    if problems:
        raise UnknownStateError("; ".join(problems))


def _changes(label: str, kept: Sequence[Leaf], thing: Any, found: Mapping[str, Entry]) -> list[str]:
    """What ``thing`` did wrong in taking over other leaves than ``kept``."""
    before = {(*leaf.inside, leaf.key): leaf.value for leaf in kept}
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


def _kept(label: str, found: Mapping[str, str]) -> list[str]:
    """What is wrong with an object that holds ``found`` with other leaves than its own: nothing would renew that."""
    if not found:
        return []
    if any(what == OPTIMIZER or what.startswith(GROUP) for what in found):
        instead = f"give a factory, state={{{label!r}: lambda optimizer: ...}}, or let it ask the Switcher"
    else:
        instead = "let it ask the Switcher, or be given them where it uses them"
    return [
        f"{label} holds {told(found)}, of which each layout has another, and would go on with the old one: {instead}"
    ]


def require_made_anew(label: str, product: Any, world: World) -> None:
    """Refuse a factory's product that holds modules: a switch hands the factory an optimizer, and nothing else.

    Raises:
        UnknownStateError: by name, also of what its state dict would bring into the next one.
    """
    belongings = Belongings(world, views=False)
    modules = {what: where for what, where in held(product, belongings).items() if what.startswith(MODULE)}
    if modules:
        raise UnknownStateError(
            f"{label}: the factory's product holds {told(modules)}, of which each layout has another; the next one is "
            "made while the old layout is still there: let it ask the Switcher where it uses them"
        )
    if there := held(product.state_dict(), belongings):
        raise UnknownStateError(
            f"{label}: the state dict of the factory's product has {told(there)}, of which each layout has another: "
            "leave that out of state_dict"
        )


def made_anew(factories: Mapping[str, Any], old: World, new: World) -> dict[str, Any]:
    """What the factories make for the optimizer of world ``new``, by label.

    Raises:
        UnknownStateError: it holds something of world ``old``, by name; that has its options again.
    """
    if not factories:
        return {}
    belongings, made = Belongings(old, but=new, views=False), {}
    before = [dict(group) for group in old.optimizer.param_groups]
    for label, factory in factories.items():
        made[label] = factory(new.optimizer)
        if found := held(made[label], belongings):
            for group, options in zip(old.optimizer.param_groups, before, strict=True):
                group.clear()
                group.update(options)
            raise UnknownStateError(
                f"{label}: its factory made one that holds {told(found)} of the old layout: it must use the optimizer "
                "that it is given"
            )
    return made


def _but_tensors(found: Mapping[str, str]) -> dict[str, str]:
    return {what: where for what, where in found.items() if what == OPTIMIZER or what.startswith((GROUP, MODULE))}


def _address(value: torch.Tensor) -> int:
    return local_tensor(value).untyped_storage().data_ptr()


def snapshot(state: Mapping[str, Any], kept: Sequence[Leaf]) -> dict[str, Any]:
    """A copy of a state dict whose leaves are the very tensors and of which nothing else is shared."""
    return copy.deepcopy(dict(state), {id(leaf.value): leaf.value for leaf in kept})


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
        kept = () if is_scheduler(thing) else leaves(label, state, world.found)
        hashes[label] = hash_of(state, {id(leaf.value) for leaf in kept})
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
