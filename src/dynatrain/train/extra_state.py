"""Extra state of modules (``get_extra_state``), such as the scales of fp8: carried as what it is, never built anew.

It has no place in any tensor, so no plan can cut it. The rule: a module's extra state is one value, equal on all ranks.
A switch hands it to the module of the same name in the new layout, and holds what that then gives against what was
given; a checkpoint has it beside registered objects. Refused by name: values that differ between ranks, shards, a
module that cannot take over what it gives, and pipeline stages, where a rank may get a module without its value.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dynatrain.models.names import strip_wrappers
from dynatrain.train.equal import hash_of
from dynatrain.train.states import UnknownStateError


def extra_states(parts: Sequence[nn.Module]) -> dict[str, Any]:
    """The extra state of every module that has some, by the module's name without wrappers; the modules' own."""
    return {name: module.get_extra_state() for name, module in _owners(parts)}


def check_extra_states(parts: Sequence[nn.Module], *, staged: bool) -> None:
    """Refuse extra state that could not be carried.

    Args:
        parts: a world's modules; as they were on return.
        staged: whether pipeline stages come in.

    Raises:
        UnknownStateError: all of it, by name.
    """
    problems = []
    for name, module in _owners(parts):
        if staged:
            problems.append(f"the extra state of {name} could not follow it to another stage: make it a buffer")
        elif any(isinstance(value, DTensor) for value in _tensors(module.get_extra_state())):
            problems.append(f"the extra state of {name} has shards in it, and nothing says of what: make them buffers")
        elif type(module).set_extra_state is nn.Module.set_extra_state:
            problems.append(f"{name} has get_extra_state and no set_extra_state: its extra state would be lost")
    if problems:
        raise UnknownStateError("; ".join(problems))


def give_extra_states(parts: Sequence[nn.Module], states: Mapping[str, Any]) -> None:
    """Hand copies of ``states`` to the modules of these names.

    Raises:
        UnknownStateError: a module has another extra state afterwards, or there is none of its name.
    """
    owners = dict(_owners(parts))
    problems = [f"no module {name} is there for its extra state" for name in sorted(states.keys() - owners.keys())]
    problems += [f"there is no extra state for {name}" for name in sorted(owners.keys() - states.keys())]
    for name in sorted(states.keys() & owners.keys()):
        owners[name].set_extra_state(copy.deepcopy(states[name]))
        found = owners[name].get_extra_state()
        if any(value.is_meta for value in _tensors(found)) or hash_of(found) != hash_of(states[name]):
            problems.append(
                f"{name}: set_extra_state does not take over what get_extra_state gave; let it keep the tensors that "
                "it is given, as those that it was built with may be on meta"
            )
    if problems:
        raise UnknownStateError("; ".join(problems))


def _owners(parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for part in parts:
        for path, module in part.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield strip_wrappers(part, path) or "the model", module


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)
