"""What a process brings to its run, in the world in which it begins."""

from typing import Any

import torch
import torch.distributed as dist

from dynatrain.cluster.board import Board
from dynatrain.cluster.worlds import Worlds
from dynatrain.execute.pieces import Pool
from dynatrain.execute.promise import Promise
from dynatrain.train.argument import ArgumentError
from dynatrain.train.groups import Connections, GroupPool
from dynatrain.train.party import Party
from dynatrain.train.torch_private import default_store

GROUP_SECONDS = 1800.0
"""How long an operation of a training group may take."""


class NameTakenError(ValueError):
    """Jobs of one process that could not be told apart."""


def standing(
    worlds: Worlds | None,
    board: Board | None,
    store: dist.Store | None,
    device: torch.device | None,
    memory: Pool | None,
    *,
    name: str = "",
    promise: Promise | None = None,
    **more: Any,
) -> Party:
    """This rank: as ``worlds`` say, else as the default group has it, in a run of one world; see ``Switcher``.

    Raises:
        NameTakenError: this process has, or had, a job of this name already.
    """
    if name and worlds:
        raise NameTakenError(f"name = {name!r}: a run under the agent has one job, without a name; leave worlds out")
    if memory and promise:
        raise ArgumentError("memory and promise: give the promise to the memory, Pool(device, promise=...)")
    rank, size = (worlds.rank, worlds.world_size) if worlds else (dist.get_rank(), dist.get_world_size())
    generation = worlds.generation if worlds else 0
    device = device or _device_of(dist.get_backend() if dist.is_initialized() else "")
    if worlds:
        board, store = worlds.board(), worlds.groups
    prefix = f"dynatrain/{name}" if name else "dynatrain"
    groups = GroupPool(
        Connections(store or dist.PrefixStore(f"{prefix}/groups", default_store())),
        rank=rank,
        world=f"{name}.g{generation}" if name else f"g{generation}",
        backend="nccl" if device.type == "cuda" else "gloo",
        timeout_seconds=GROUP_SECONDS,
    )
    return Party(
        rank=rank,
        world_size=size,
        member=worlds.member if worlds else rank,
        members=tuple(range(size)),
        generation=generation,
        worlds=worlds,
        board=board or Board(_own_store(prefix, name, rank), size),
        groups=groups,
        memory=memory or Pool(device, promise=promise),
        device=device,
        factories={},
        early=bool(name),
        **more,
    )


def _own_store(prefix: str, name: str, rank: int) -> dist.Store:
    """Where the ranks of one job agree.

    Raises:
        NameTakenError: another job of this process has used it.
    """
    store = dist.PrefixStore(f"{prefix}/board", default_store())
    if int(store.add(f"here/{rank}", 1)) > 1:
        said = f"is called {name!r}" if name else "has no name"
        raise NameTakenError(
            f"a Switcher that {said} has been made in this process before; what its ranks agreed on is still there. "
            "Give each its own: Switcher(name='critic')"
        )
    return store


def _device_of(backend: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
