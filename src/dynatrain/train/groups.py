"""Process groups, pooled by (generation, purpose, members): a layout that returns finds its groups again.

Moves, checks and control never share a group with training, so that a failed move is torn down alone.
"""

import itertools
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dynatrain.layout.layout import AXES, Coordinates, Layout
from dynatrain.train.torch_private import clear_dtensor_caches, named_group


class GroupPool:
    """All process groups of one generation of one rank.

    Owns what it makes: :meth:`discard` and :meth:`close` destroy exactly those. Members of a group must ask for it in
    the same order relative to each other; every rank derives its requests from the layout alone, which gives that.

    Args:
        store: shared by all ranks of the generation; lives outside the ranks.
        rank: this process.
        generation: number of the world; part of every group's name.
        backend: ``gloo`` or ``nccl``.
        timeout_seconds: of the training groups' operations.
    """

    def __init__(self, store: dist.Store, *, rank: int, generation: int, backend: str, timeout_seconds: float) -> None:
        self.store = store
        self.rank = rank
        self.generation = generation
        self.backend = backend
        self.timeout_seconds = timeout_seconds
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._attempts: dict[tuple[str, tuple[int, ...]], int] = {}
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._groups)

    def get(
        self, purpose: str, members: Sequence[int], *, backend: str = "", timeout_seconds: float = 0.0
    ) -> dist.ProcessGroup:
        """The group of ``members`` (this rank among them) for ``purpose``, made on first use.

        Blocks on first use until all members ask.

        Args:
            purpose: ``mesh``, ``moves``, ``check``, ``tied``: groups of different purposes never share connections.
            members: global ranks in group order.
            backend: other than the pool's (control traffic stays on gloo).
            timeout_seconds: other than the pool's.
        """
        key = (purpose, tuple(members))
        with self._lock:
            if key not in self._groups:
                attempt = self._attempts.setdefault(key, 0)
                name = f"g{self.generation}.{purpose}.{attempt}." + "_".join(map(str, members))
                self._groups[key] = named_group(
                    name,
                    list(members),
                    backend or self.backend,
                    self.store,
                    timedelta(seconds=timeout_seconds or self.timeout_seconds),
                )
            return self._groups[key]

    def discard(self, purpose: str, members: Sequence[int]) -> None:
        """Destroy one group, releasing peers that wait in it; the next :meth:`get` makes a new one."""
        key = (purpose, tuple(members))
        with self._lock:
            group = self._groups.pop(key, None)
            self._attempts[key] = self._attempts.get(key, 0) + 1
        if group is not None:
            dist.destroy_process_group(group)

    def close(self) -> None:
        """Destroy all groups; DTensor's caches forget them first."""
        clear_dtensor_caches()
        for purpose, members in list(self._groups):
            self.discard(purpose, members)
        self._meshes.clear()

    def mesh(self, layout: Layout, device_type: str) -> DeviceMesh:
        """The device mesh of ``layout``: always the axes of ``AXES`` in that order, from pooled groups."""
        ranks = rank_grid(layout)
        shape = tuple(layout.size(axis) for axis in AXES)
        key = (*shape, *ranks)
        if key not in self._meshes:
            grid = torch.tensor(ranks, dtype=torch.int).view(shape)
            mine = [self.get("mesh", axis_members(layout, axis, self.rank)) for axis in AXES]
            self._meshes[key] = DeviceMesh.from_group(mine, device_type, mesh=grid, mesh_dim_names=AXES)
        return self._meshes[key]


def rank_grid(layout: Layout) -> list[int]:
    """Ranks in row-major order over ``AXES``."""
    sizes = [range(layout.size(axis)) for axis in AXES]
    return [
        layout.rank_at(Coordinates(pp=pp, dp=dp, fsdp=fsdp, tp=tp)) for pp, dp, fsdp, tp in itertools.product(*sizes)
    ]


def axis_members(layout: Layout, axis: str, rank: int) -> list[int]:
    """The ranks that differ from ``rank`` along ``axis`` only, in the order of that axis."""
    at = layout.coordinates(rank)
    places = {name: at.along(name) for name in AXES}
    return [layout.rank_at(Coordinates(**{**places, axis: i})) for i in range(layout.size(axis))]
