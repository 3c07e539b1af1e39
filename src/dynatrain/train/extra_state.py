"""Extra state of modules (``get_extra_state``), such as the scales of fp8: carried as what it is, never built anew.

It has no place in any tensor, so no plan can cut it. The rule: a module's extra state is one value, equal on all ranks
that have the module. A switch hands it to the modules of the same name in the new layout, and holds what they then give
against what was given; a checkpoint has it beside registered objects. Where pipeline stages come in, a rank may get a
module that it had not: then one rank of each stage tells all others what its modules hold. Refused by name: values that
differ, shards, a module that cannot take over what it gives, and among stages what could only be read by running code.
"""

import base64
import copy
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dynatrain.layout.layout import Layout
from dynatrain.models.names import NameRule
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.equal import hash_of
from dynatrain.train.states import UnknownStateError

_KEY = "_extra_state"
"""What torch calls a module's extra state in a state dict: a rule of names is asked for that."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A module with extra state. One rank may have several of a name, one in each of its parts."""

    name: str
    module: nn.Module


def owners(parts: Sequence[nn.Module], rule: NameRule) -> list[Owner]:
    """The modules of ``parts`` that have extra state, by the name that ``rule`` gives them without wrappers."""
    return [
        Owner(
            rule(part, f"{path}.{_KEY}" if path else _KEY).removesuffix(_KEY).removesuffix(".") or "the model", module
        )
        for part in parts
        for path, module in part.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]


def extra_states(found: Sequence[Owner]) -> dict[str, Any]:
    """The extra state of each name; the modules' own.

    Raises:
        UnknownStateError: modules of one name have several values, by name.
    """
    states: dict[str, Any] = {}
    differ = []
    for owner in found:
        state = owner.module.get_extra_state()
        if hash_of(states.setdefault(owner.name, state)) != hash_of(state):
            differ.append(f"the extra state of {owner.name} is not equal in all stages of this rank")
    if differ:
        raise UnknownStateError("; ".join(differ))
    return states


def speaks(layout: Layout, rank: int) -> bool:
    """Whether ``rank`` is the one of its stage that tells, or writes, what the stage's modules hold."""
    number = layout.number(rank)
    return number is not None and number % layout.digit("pp")[0] == 0


def check_extra_states(found: Sequence[Owner], *, staged: bool) -> None:
    """Refuse extra state that could not be carried.

    Args:
        found: of a world; as they were on return.
        staged: whether pipeline stages come in.

    Raises:
        UnknownStateError: all of it, by name.
    """
    problems = []
    for owner in found:
        name, state = owner.name, owner.module.get_extra_state()
        if any(isinstance(value, DTensor) for value in _tensors(state)):
            problems.append(f"the extra state of {name} has shards in it, and nothing says of what: make them buffers")
        elif type(owner.module).set_extra_state is nn.Module.set_extra_state:
            problems.append(f"{name} has get_extra_state and no set_extra_state: its extra state would be lost")
        elif staged and (why := unreadable(state)):
            problems.append(f"the extra state of {name} could not follow it to another stage; {why}")
    if problems:
        raise UnknownStateError("; ".join(problems))


def unreadable(state: Any) -> str:
    """Why ``state`` could be written and not read back, since reading runs no code of a pickle's; else empty."""
    try:
        _decoded(_encoded(state), torch.device("cpu"))
    except Exception as error:  # noqa: BLE001 - its text is for the user
        return f"keep to numbers, texts, tensors and containers of them: {str(error).splitlines()[0]}"
    return ""


def tell(old: Sequence[Owner], new: Sequence[Owner], *, speaks: bool) -> list[Any]:
    """What this rank tells all others before a switch, as JSON values; for :func:`hear`.

    Args:
        old: of the world that trains.
        new: of the world to come.
        speaks: this rank tells the values, too.
    """
    states = extra_states(old)
    hashes = {name: hash_of(state) for name, state in states.items()}
    values = {name: _encoded(state) for name, state in states.items()} if speaks else {}
    return [hashes, sorted({owner.name for owner in new}), values]


def hear(told: Sequence[list[Any]], old: Sequence[Owner], new: Sequence[Owner], device: torch.device) -> dict[str, Any]:
    """The extra state of this rank's next modules, out of all ranks' :func:`tell`; its own where it has it.

    Raises:
        SwitchAbortedError: values differ, or a module is lost or new in the next layout, by name; on every rank alike.
    """
    holders = {name for hashes, _, _ in told for name in hashes}
    values = {name: value for *_, of_rank in told for name, value in of_rank.items()}
    taken = {name for _, names, _ in told for name in names}
    problems = [f"no module {name} is there for its extra state" for name in sorted(holders - taken)]
    problems += [
        f"there is no extra state for {name} of rank {rank}"
        for rank, (hashes, names, _) in enumerate(told)
        for name in names
        if name not in hashes and name not in values
    ]
    problems += unlike([hashes for hashes, _, _ in told])
    if problems:
        raise SwitchAbortedError("; ".join(problems))
    mine = extra_states(old)
    return {
        name: mine[name] if name in mine else _decoded(values[name], device) for name in {owner.name for owner in new}
    }


def hashes_of(found: Sequence[Owner]) -> dict[str, str]:
    """A hash of the extra state of each name."""
    return {name: hash_of(state) for name, state in extra_states(found).items()}


def unlike(told: Sequence[Mapping[str, str]]) -> list[str]:
    """Whose extra state is not one value on all ranks that have the module, by their :func:`hashes_of`."""
    holders: dict[str, dict[int, str]] = {}
    for rank, hashes in enumerate(told):
        for name, one in hashes.items():
            holders.setdefault(name, {})[rank] = one
    problems = []
    for name, by_rank in sorted(holders.items()):
        first, *_ = by_rank
        if others := [rank for rank, one in by_rank.items() if one != by_rank[first]]:
            said = f"the extra state of {name} is not equal on all ranks"
            problems.append(f"{said}: ranks {others} differ from rank {first}")
    return problems


def give_extra_states(found: Sequence[Owner], states: Mapping[str, Any]) -> None:
    """Hand copies of ``states`` to the modules of these names.

    Raises:
        UnknownStateError: a module has another extra state afterwards.
    """
    problems = []
    for owner in found:
        state = states[owner.name]
        owner.module.set_extra_state(copy.deepcopy(state))
        after = owner.module.get_extra_state()
        if any(value.is_meta for value in _tensors(after)) or hash_of(after) != hash_of(state):
            problems.append(
                f"{owner.name}: set_extra_state does not take over what get_extra_state gave; let it keep the tensors "
                "that it is given, as those that it was built with may be on meta"
            )
    if problems:
        raise UnknownStateError("; ".join(problems))


def _encoded(state: Any) -> str:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _decoded(text: str, device: torch.device) -> Any:
    """What was encoded, on another rank perhaps: what was on a device there is on this rank's."""

    def place(storage: torch.UntypedStorage, where: str) -> torch.UntypedStorage:
        return storage if where == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(base64.b64decode(text)), map_location=place, weights_only=True)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)
