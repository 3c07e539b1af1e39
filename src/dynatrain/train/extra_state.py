"""Extra state of modules (``get_extra_state``), such as the scales of fp8: carried as what it is, never built anew.

It has no place in any tensor, so no plan can cut it. The rule: a module's extra state is one value, equal on all ranks
that have the module. A switch hands it to the module of the same name in the new layout, and holds what that then gives
against what was given; a checkpoint has it beside registered objects. Out of a pipeline, one rank of each stage tells
all others its stage's with the answer to a question that they all ask anyway. Refused by name: values that differ
between ranks, shards, and a module that cannot take over what it gives.
"""

import base64
import copy
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dynatrain.layout.layout import Layout
from dynatrain.models.names import strip_wrappers
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.equal import hash_of
from dynatrain.train.states import UnknownStateError


def extra_states(parts: Sequence[nn.Module]) -> dict[str, Any]:
    """The extra state of every module that has some, by the module's name without wrappers; the modules' own."""
    return {name: module.get_extra_state() for name, module in _owners(parts)}


def told_extra_states(states: Mapping[str, Any], layout: Layout, rank: int) -> dict[str, str]:
    """What a rank tells the others of its stage's extra state, as text by name; nothing where all have everything.

    Args:
        states: this rank's, by name.
        layout: in which it has them.
        rank: this rank.

    Raises:
        UnknownStateError: it could not be read: reading runs no code of a pickle's.
    """
    at = layout.coordinates(rank)
    if layout.size("pp") == 1 or (at.dp, at.fsdp, at.cp, at.tp) != (0, 0, 0, 0):
        return {}
    told, problems = {}, []
    for name, state in states.items():
        buffer = io.BytesIO()
        torch.save(state, buffer)
        told[name] = base64.b64encode(buffer.getvalue()).decode()
        try:
            _read(told[name])
        except Exception as error:  # noqa: BLE001 - told by name
            problems.append(
                f"the extra state of {name} could not be read by another stage; keep to numbers, texts, tensors and "
                f"containers of them: {str(error).splitlines()[0]}"
            )
    if problems:
        raise UnknownStateError("; ".join(problems))
    return told


def all_extra_states(mine: Mapping[str, Any], told: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The extra state of all stages: this rank's, and copies of what others told (:func:`told_extra_states`)."""
    return dict(mine) | {name: _read(text) for of_rank in told for name, text in of_rank.items() if name not in mine}


def _read(text: str) -> Any:
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)


def check_extra_states(parts: Sequence[nn.Module]) -> None:
    """Refuse extra state that could not be carried.

    Args:
        parts: a world's modules; as they were on return.

    Raises:
        UnknownStateError: all of it, by name.
    """
    problems = []
    for name, module in _owners(parts):
        if any(isinstance(value, DTensor) for value in _tensors(module.get_extra_state())):
            problems.append(f"the extra state of {name} has shards in it, and nothing says of what: make them buffers")
        elif type(module).set_extra_state is nn.Module.set_extra_state:
            problems.append(f"{name} has get_extra_state and no set_extra_state: its extra state would be lost")
    if problems:
        raise UnknownStateError("; ".join(problems))


def give_extra_states(parts: Sequence[nn.Module], states: Mapping[str, Any]) -> list[str]:
    """Hand copies of ``states`` to the modules of these names.

    Returns:
        The names of those that this rank has: see :func:`require_owners`.

    Raises:
        UnknownStateError: a module has another extra state afterwards, or there is none of its name.
    """
    owners = dict(_owners(parts))
    problems = [f"there is no extra state for {name}" for name in sorted(owners.keys() - states.keys())]
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
    return sorted(owners)


def require_owners(states: Iterable[str], given: Iterable[Sequence[str]]) -> None:
    """Refuse a layout in which no rank has a module for some extra state.

    Args:
        states: names of all there is.
        given: of every rank, the names that it has modules of.

    Raises:
        SwitchAbortedError: by name; on every rank alike.
    """
    if lost := sorted(set(states).difference(*given)):
        raise SwitchAbortedError(f"no module is there for the extra state of {', '.join(lost)}")


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
