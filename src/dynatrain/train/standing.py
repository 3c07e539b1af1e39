"""What a process brings to its run, in the world in which it begins."""

from typing import Any

import torch
import torch.distributed as dist

from dynatrain.cluster.board import Board
from dynatrain.cluster.worlds import Worlds
from dynatrain.execute.pieces import Pool
from dynatrain.train.groups import GroupPool
from dynatrain.train.party import Party
from dynatrain.train.torch_private import default_store

GROUP_SECONDS = 1800.0
"""How long an operation of a training group may take."""


def standing(
    worlds: Worlds | None,
    board: Board | None,
    store: dist.Store | None,
    device: torch.device | None,
    memory: Pool | None,
    **more: Any,
) -> Party:
    """This rank: as ``worlds`` say, else as the default group has it, in a run of one world; see ``Switcher``."""
    rank, size = (worlds.rank, worlds.world_size) if worlds else (dist.get_rank(), dist.get_world_size())
    generation = worlds.generation if worlds else 0
    device = device or _device_of(dist.get_backend() if dist.is_initialized() else "")
    if worlds:
        board, store = worlds.board(), worlds.groups
    groups = GroupPool(
        store or dist.PrefixStore("dynatrain/groups", default_store()),
        rank=rank,
        world=f"g{generation}",
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
        board=board or Board(dist.PrefixStore("dynatrain/board", default_store()), size),
        groups=groups,
        memory=memory or Pool(device),
        device=device,
        factories={},
        **more,
    )


def _device_of(backend: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
