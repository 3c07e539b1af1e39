"""What is kept beside each parameter: optimizer states and the values of registered objects.

What an optimizer keeps is told by its schema (:mod:`dynatrain.train.optimizers.schema`). Anything else is refused by
name at start, never found missing at the first switch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from dynatrain.space.tensor import State
from dynatrain.train.live import Entry
from dynatrain.train.optimizers.schema import kept
from dynatrain.train.optimizers.state import blank, local_shape
from dynatrain.train.torch_private import local_tensor


class UnknownStateError(ValueError):
    """State that no schema describes: every problem found, by name."""


class Registered(Protocol):
    """What a registered object (EMA, gradient scaler, scheduler) must offer."""

    def state_dict(self) -> dict[str, Any]:
        """All its state; tensors that belong to a parameter sit under that parameter's name."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over all of ``state``."""


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every trainable parameter the state that its first step would create, without stepping.

    A parameter that never receives a gradient keeps it so, in every layout; one that receives its first gradient after
    a switch starts as in a run without.

    Raises:
        UnknownStateError: an optimizer whose state is not known.
    """
    for param, states, group in _kept(optimizer):
        held = optimizer.state[param]
        if states and not held:
            held.update({state.name: blank(param, state, group) for state in states})


def _kept(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, tuple[State, ...], dict[str, Any]]]:
    try:
        return list(kept(optimizer))
    except (LookupError, ValueError) as error:
        raise UnknownStateError(*error.args) from None


def optimizer_states(
    optimizer: torch.optim.Optimizer, found: Mapping[str, Entry]
) -> dict[str, dict[State, torch.Tensor]]:
    """``{tensor name: {state: value}}`` of what the optimizer holds, by name; every tensor is there, possibly empty.

    Raises:
        UnknownStateError: what it holds is not what its schema says: everything that is wrong, by name.
    """
    problems = []
    states: dict[str, dict[State, torch.Tensor]] = {name: {} for name in found}
    names = {id(entry.value): name for name, entry in found.items()}
    schemas = {id(param): {state.name: state for state in of} for param, of, _ in _kept(optimizer)}
    for param, values in optimizer.state.items():
        if wrong := _unowned(param, values):
            problems.append(wrong)
            continue
        name = names.get(id(param))
        if name is None:
            problems.append(f"the optimizer holds state for a parameter of shape {tuple(param.shape)} not in the model")
            continue
        schema = schemas.get(id(param), {})
        if values and (missing := sorted(schema.keys() - values.keys())):
            problems.append(f"state {', '.join(missing)} of {name} is missing from the optimizer")
        for key, value in sorted(values.items(), key=lambda item: str(item[0])):
            state = schema.get(key)
            if state is None:
                problems.append(f"state {key} of {name} ({_brief(value)}) is not in the optimizer's schema")
            elif wrong := _misshapen(param, state, value):
                problems.append(f"state {key} of {name} {wrong}")
            else:
                dtype = _dtype(value)
                states[name][state if state.dtype == dtype else replace(state, dtype=dtype)] = value
    if problems:
        raise UnknownStateError("; ".join(problems))
    return states


def _unowned(key: object, values: object) -> str:
    """Why an entry of an optimizer's state is not that of a parameter; empty where it is."""
    if not isinstance(key, torch.Tensor):
        return (
            f"the optimizer's state has {key!r} ({_brief(values)}), which belongs to no parameter: keep it as a plain "
            "attribute of the optimizer (self.t = 0), which goes along, or in state[param] under a schema"
        )
    if not isinstance(values, Mapping):
        return f"the optimizer's state of a parameter is {_brief(values)}; it is a dict of states by name"
    return ""


def _misshapen(param: torch.Tensor, state: State, value: object) -> str:
    """Why ``value`` cannot be this state of ``param``; empty where it can."""
    if state.scalar:
        wanted: tuple[int, ...] = ()
    elif state.like_tensor:
        wanted = tuple(param.shape)
    else:
        wanted = local_shape(param, state)
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
    return "" if shape == wanted else f"is {_brief(value)}; its schema says shape {wanted}"


def _brief(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


@dataclass(frozen=True, slots=True)
class Leaf:
    """A parameter-shaped tensor inside a registered object's ``state_dict``.

    Attributes:
        label: the object's registered name.
        inside: keys from the top of its state dict to the container.
        key: the key under which it sits there.
        tensor: canonical name of the parameter that it belongs to.
        spelled: that name, or the path in the module (which wrappers lengthen), as it stands at the end of ``key``.
        value: the tensor itself: a DTensor like the parameter, or its plain local shard.
    """

    label: str
    inside: tuple[str, ...]
    key: str
    tensor: str
    spelled: str
    value: torch.Tensor

    @property
    def state(self) -> str:
        """Name of the state in the catalogue."""
        return ".".join((self.label, *self.inside))


@dataclass(frozen=True, slots=True)
class Form:
    """How a registered object keeps one state: equal on all ranks, also on those that hold no leaf of it yet.

    Attributes:
        label: the object's registered name.
        inside: keys from the top of its state dict to the container.
        prefix: what stands before a tensor's name in a key.
        canonical: keys have canonical names where those differ from the paths in the module.
        plain: values are plain local shards, not DTensors.
    """

    label: str
    inside: tuple[str, ...]
    prefix: str
    canonical: bool
    plain: bool


def forms(held: Mapping[str, list[Leaf]], found: Mapping[str, Entry]) -> dict[str, Form]:
    """The form of every state of which this rank holds a leaf, by the state's name."""
    result: dict[str, Form] = {}
    for leaf in (leaf for of_object in held.values() for leaf in of_object):
        seen = result.get(leaf.state)
        canonical = leaf.spelled == leaf.tensor != found[leaf.tensor].paths[0][1]
        plain = isinstance(found[leaf.tensor].value, DTensor) and not isinstance(leaf.value, DTensor)
        result[leaf.state] = Form(
            leaf.label,
            leaf.inside,
            leaf.key.removesuffix(leaf.spelled),
            canonical or (seen is not None and seen.canonical),
            plain or (seen is not None and seen.plain),
        )
    return result


def leaves(label: str, state_dict: Mapping[str, Any], found: Mapping[str, Entry]) -> list[Leaf]:
    """All parameter-shaped tensors of one registered object.

    Raises:
        UnknownStateError: a tensor under a parameter's name that is neither shaped like it nor like its shard, and
            any other tensor that is sharded.
    """
    result, problems = [], []
    spellings = {path: name for name, entry in found.items() for _, path in entry.paths} | {
        name: name for name in found
    }
    for inside, key, value in _walk(state_dict, ()):
        if isinstance(value, list | tuple):
            problems.append(
                f"{label}: {'.'.join((*inside, key))} is a list of tensors, of which nothing says to what parameters "
                "they belong; let the state dict have them under the parameters' names"
            )
            continue
        spelled = key.removeprefix("module.")
        name = spellings.get(spelled, "")
        entry = found.get(name)
        if entry is None or (value.ndim == 0 and entry.value.ndim > 0):  # a scaler's scale is not a tensor called scale
            if isinstance(value, DTensor):
                problems.append(f"{label}: sharded tensor {'.'.join((*inside, key))} belongs to no parameter")
            continue
        whole = tuple(value.shape) == tuple(entry.value.shape)
        shard = not isinstance(value, DTensor) and value.shape == local_tensor(entry.value).shape
        if not (whole and isinstance(value, DTensor) == isinstance(entry.value, DTensor)) and not shard:
            problems.append(f"{label}: {'.'.join((*inside, key))} has {_brief(value)}, its parameter {name} another")
            continue
        result.append(Leaf(label, inside, key, name, spelled, value))
    if problems:
        raise UnknownStateError("; ".join(problems))
    return result


def _walk(node: Mapping[str, Any], inside: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """All tensors with the keys that lead to them, and the lists that have tensors (scalars apart) in them."""
    for key, value in node.items():
        in_list = isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) and v.ndim for v in value)
        if isinstance(value, torch.Tensor) or in_list:
            yield inside, str(key), value
        elif isinstance(value, Mapping):
            yield from _walk(value, (*inside, str(key)))


def replace_leaves(state_dict: dict[str, Any], old: list[Leaf], new: list[Leaf]) -> dict[str, Any]:
    """A copy of a registered object's state dict in which the leaves of ``old`` gave way to those of ``new``."""
    gone = {(leaf.inside, leaf.key) for leaf in old}

    def copy(node: Mapping[str, Any], inside: tuple[str, ...]) -> dict[str, Any]:
        kept = {
            key: copy(value, (*inside, str(key))) if isinstance(value, Mapping) else value
            for key, value in node.items()
            if (inside, str(key)) not in gone
        }
        return kept | {leaf.key: leaf.value for leaf in new if leaf.inside == inside}

    return copy(state_dict, ())


def catalogue_states(
    found: Mapping[str, Entry], optimizer: Mapping[str, Mapping[State, Any]], object_leaves: list[Leaf]
) -> dict[str, tuple[State, ...]]:
    """The states of each tensor: value, then the optimizer's, then the registered objects'; equal on all ranks."""
    result = {}
    for name, entry in found.items():
        states = [State(entry.kind, _dtype(entry.value))]
        states += optimizer[name]
        states += [State(leaf.state, _dtype(leaf.value)) for leaf in object_leaves if leaf.tensor == name]
        result[name] = tuple(states)
    return result


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
