"""What states are called in a checkpoint: as a state dict has them that plain PyTorch makes and loads.

``{"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}``, under canonical names. What
registered objects keep for parameters is beside them, under ``objects``.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dynatrain.plan.plan import Granule
from dynatrain.train.world import World

Place = tuple[str | int, ...]
"""Where something stands in the nested state dict."""

STATE: Place = ("dynatrain",)
"""Where our own account stands: step, layout, what registered objects hold in common."""

GROUPS = "optim.param_groups."
"""What the keys of :func:`group_paths` begin with."""


def flat(path: Place) -> str:
    """The key that DCP makes of a path."""
    return ".".join(map(str, path))


def streams_path(rank: int) -> Place:
    """Where the random streams of a rank stand; by text, as PyTorch takes a list without tensors for one value."""
    return ("streams", str(rank))


def extra_path(name: str) -> Place:
    """Where the extra state of a module stands."""
    return ("extra", name)


def granule_paths(world: World) -> Iterator[tuple[Granule, Place]]:
    """Every state of every tensor, and where it stands."""
    for index, tensor in enumerate(world.catalogue):
        for number, state in enumerate(tensor.states):
            yield (index, number), granule_path(tensor.name, state.name, first=number == 0, forms=world.forms)


def granule_path(tensor: str, state: str, *, first: bool, forms: Mapping[str, Any]) -> Place:
    """Where one state of a tensor stands; ``first`` is its value."""
    if first:
        return ("model", tensor)
    if state in forms:
        return ("objects", *state.split("."), tensor)
    return ("optim", "state", tensor, state)


def group_paths(groups: list[dict[str, Any]]) -> dict[Place, Any]:
    """The options of parameter groups, each at its place; ``params`` are names."""
    return {
        ("optim", "param_groups", number, key): value
        for number, group in enumerate(groups)
        for key, value in group.items()
    }
