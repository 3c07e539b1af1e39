"""Process groups, pooled by (world, purpose, members): a layout that returns finds its groups again.

Moves, checks and control never share a group with training, so that a failed move is torn down alone.

What a switch makes is its own until it commits (:meth:`GroupPool.draft`): an attempt that was given up may have made a
group on some members only, and the next attempt, which would find it there and not on the others, would wait for ever.
For the same reason the name of a group says which switch made it, and no group is made before all its members have
come: torch waits inside the store, where nobody can call a thread back. A member that is lost after it has come and
before it has connected leaves the others in that wait all the same, for as long as an operation of the group may take:
so nobody waits for a thread that makes groups, or needs its connection to the store (:class:`Connections`).
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dynatrain.layout.layout import EXPERT_MESH_AXES, MESH_AXES, Digit, Layout
from dynatrain.train.torch_private import clear_dtensor_caches, named_group

COPIES = "copies"
"""Mesh axis of the ranks that hold copies of one part; no axis of a layout."""

DEFAULT = "default"
"""Purpose of a default group."""

_POLL = (0.0005, 0.01)  # seconds between two looks: at first, at most

_Key = tuple[str, tuple[int, ...]]


class GroupError(RuntimeError):
    """A group cannot be had: members did not come in time, or its switch was given up meanwhile."""


class Connections:
    """Connections to a store for making groups: one for each thread that makes one at the moment.

    A connection takes one call after the other. While torch waits inside the store for a peer, nothing else comes
    through: a thread that waits for a lost peer, and was given up, would have the next attempt wait behind it.

    Args:
        store: the first connection; used by nobody else.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._idle = [store]

    @contextmanager
    def one(self) -> Iterator[dist.Store]:
        """One that no other thread uses inside."""
        try:
            store = self._idle.pop()
        except IndexError:
            store = self._store.clone()
        try:
            yield store
        finally:
            self._idle.append(store)


class GroupPool:
    """All process groups of one rank in one world, or those that one switch has made so far.

    Owns what it makes: :meth:`discard` and :meth:`close` destroy exactly those. Members of a group must ask for it in
    the same order relative to each other; every rank derives its requests from the layout alone, which gives that.

    Args:
        connections: to a store that all ranks of the world share; it lives outside the ranks.
        rank: this process.
        world: name of the world; part of every group's name.
        backend: ``gloo`` or ``nccl``.
        timeout_seconds: of the training groups' operations.
        base: the pool that a switch draws on; None for the standing one.
        switch: number of the switch, 0 for none; part of every group's name.
        patience: seconds in which all members of a new group must come.

    Attributes:
        connections: likewise.
    """

    def __init__(
        self,
        connections: Connections,
        *,
        rank: int,
        world: str,
        backend: str,
        timeout_seconds: float,
        base: "GroupPool | None" = None,
        switch: int = 0,
        patience: float = 1800.0,
    ) -> None:
        self.connections = connections
        self.rank = rank
        self.world = world
        self.backend = backend
        self.timeout_seconds = timeout_seconds
        self._base = base
        self._switch = switch
        self._patience = patience
        self._groups: dict[_Key, dist.ProcessGroup] = {}
        self._meshes: dict[tuple[object, ...], DeviceMesh] = {}
        self._closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._groups)

    def draft(self, switch: int, patience: float) -> "GroupPool":
        """A pool on top of this one for what a switch makes; then :meth:`keep` or :meth:`close` it."""
        return GroupPool(
            self.connections,
            rank=self.rank,
            world=self.world,
            backend=self.backend,
            timeout_seconds=self.timeout_seconds,
            base=self,
            switch=switch,
            patience=patience,
        )

    def keep(self) -> None:
        """The switch is committed: what it made belongs to the standing pool."""
        assert self._base is not None
        self._base._groups |= self._groups  # noqa: SLF001
        self._base._meshes |= self._meshes  # noqa: SLF001
        self._groups, self._meshes = {}, {}

    def get(
        self, purpose: str, members: Sequence[int], *, backend: str = "", timeout_seconds: float = 0.0
    ) -> dist.ProcessGroup:
        """The group of ``members`` (this rank among them) for ``purpose``, made on first use.

        Blocks on first use until all members ask.

        Args:
            purpose: ``mesh``, ``moves``, ``check``, ``back``: groups of different purposes never share connections;
                :data:`DEFAULT` for the default group of a world to come.
            members: global ranks in group order.
            backend: other than the pool's (control traffic stays on gloo).
            timeout_seconds: other than the pool's.

        Raises:
            GroupError: members did not come in time, and are named; or this pool was closed meanwhile.
            dist.DistError, RuntimeError: one has come and did not connect within ``timeout_seconds``.
        """
        key = (purpose, tuple(members))
        if (found := self._find(key)) is not None:
            return found
        name = f"{self.world}.s{self._switch}.{purpose}." + "_".join(map(str, members))
        with self.connections.one() as store:
            self._meet(store, name, members)
            group = named_group(
                name,
                list(members),
                self.rank,
                backend or self.backend,
                store,
                timedelta(seconds=timeout_seconds or self.timeout_seconds),
            )
            _forget(store, name, len(members))
        with self._lock:
            if not self._closed:
                self._groups[key] = group
                return group
        dist.destroy_process_group(group)
        raise GroupError("the switch was given up")

    def discard(self, purpose: str, members: Sequence[int]) -> None:
        """Destroy one group wherever it is pooled, releasing peers that wait in it. All members do."""
        key = (purpose, tuple(members))
        with self._lock:
            group = self._groups.pop(key, None)
        if group is not None:
            dist.destroy_process_group(group)
        if self._base is not None:
            self._base.discard(purpose, members)

    def take(self, group: dist.ProcessGroup) -> None:
        """Own the default group of this world, too, whoever made it."""
        self._groups.setdefault((DEFAULT, tuple(range(group.size()))), group)

    def close(self) -> None:
        """Destroy all groups of this pool; DTensor's caches forget them first. Nothing is made any more.

        Not the group that is the default one now: what init_process_group made, the user destroys.
        """
        with self._lock:
            self._closed = True
        if self._groups:
            clear_dtensor_caches()
        for key in list(self._groups):
            group = self._groups.pop(key)
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self._meshes.clear()

    def mesh(self, layout: Layout, device_type: str, axes: tuple[str, ...] = MESH_AXES) -> DeviceMesh:
        """A device mesh of ``layout``, from pooled groups: that of parameters, of experts, or of copied heads.

        Args:
            layout: of all ranks.
            device_type: ``cpu`` or ``cuda``.
            axes: :data:`MESH_AXES`, where ``fsdp`` is fsdp x cp (both shard parameters as one), or
                :data:`EXPERT_MESH_AXES`, or the former with two axes in place of tp: ``tp8``, which has 8 parts, and
                :data:`COPIES`, the ranks of one part.
        """
        ranks = rank_grid(layout)
        digits = [(1, layout.digit(axes[-2])[0]) if axis == COPIES else layout.digit(axis) for axis in axes]
        shape = tuple(ways for _, ways in digits)
        key = (axes, *shape, *ranks)
        if self._base is not None and (found := self._base._meshes.get(key)) is not None:  # noqa: SLF001
            return found
        if key not in self._meshes:
            grid = torch.tensor(ranks, dtype=torch.int).view(shape)
            purposes = [
                "mesh" if axis in MESH_AXES else "experts" if axis in EXPERT_MESH_AXES else "heads" for axis in axes
            ]
            mine = [
                self.get(purpose, _members(layout, digit, self.rank))
                for purpose, digit in zip(purposes, digits, strict=True)
            ]
            self._meshes[key] = DeviceMesh.from_group(mine, device_type, mesh=grid, mesh_dim_names=axes)
        return self._meshes[key]

    def _find(self, key: _Key) -> dist.ProcessGroup | None:
        found = self._groups.get(key)
        return self._base._find(key) if found is None and self._base is not None else found  # noqa: SLF001

    def _meet(self, store: dist.Store, name: str, members: Sequence[int]) -> None:
        """Wait, without blocking inside the store, until all members ask for the group."""
        end = time.monotonic() + self._patience
        pause, longest = _POLL
        store.append(f"{name}/came", f"{self.rank} ")
        while missing := set(members) - {int(rank) for rank in store.get(f"{name}/came").split()}:
            if self._closed:
                raise GroupError("the switch was given up")
            if time.monotonic() > end:
                raise GroupError(f"ranks {sorted(missing)} did not come to make a group within {self._patience:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, longest)


_BUILDING: ContextVar[tuple[GroupPool, Layout, str]] = ContextVar("building")


@contextmanager
def building(pool: GroupPool, layout: Layout, device_type: str) -> Iterator[None]:
    """Inside it what build asks of this module below is that of ``layout``, out of ``pool``."""
    token = _BUILDING.set((pool, layout, device_type))
    try:
        yield
    finally:
        _BUILDING.reset(token)


def context_group() -> dist.ProcessGroup:
    """The ranks that share this rank's sequences (cp), in their order. To be called in ``build``, by all ranks."""
    pool, layout, _ = _BUILDING.get()
    return pool.get("context", axis_members(layout, "cp", pool.rank))


def expert_mesh() -> DeviceMesh:
    """The mesh of experts, :data:`EXPERT_MESH_AXES`. To be called in ``build``, by all ranks of a stage."""
    pool, layout, device_type = _BUILDING.get()
    with torch.device("cpu"):  # a build on meta is under way
        return pool.mesh(layout, device_type, EXPERT_MESH_AXES)


def heads_mesh(num_heads: int) -> DeviceMesh:
    """This rank's mesh of tp ranks as heads x copies, axes ``tp{num_heads}`` and :data:`COPIES`.

    To be called in ``build``, by all ranks, where heads are fewer than tp ranks.
    """
    pool, layout, device_type = _BUILDING.get()
    heads = f"tp{num_heads}"
    with torch.device("cpu"):  # a build on meta is under way
        return pool.mesh(layout, device_type, (*MESH_AXES[:-1], heads, COPIES))[heads, COPIES]


def rank_grid(layout: Layout) -> list[int]:
    """Ranks in row-major order over ``MESH_AXES``."""
    return [layout.rank_of(number) for number in range(layout.world_size)]


def axis_members(layout: Layout, axis: str, rank: int) -> list[int]:
    """The ranks that differ from ``rank`` along ``axis`` only, in the order of that axis.

    Args:
        layout: of all ranks.
        axis: as :meth:`~dynatrain.layout.layout.Layout.digit` takes it: ``fsdp`` is fsdp x cp.
        rank: one of the members.
    """
    return _members(layout, layout.digit(axis), rank)


def _forget(store: dist.Store, name: str, size: int) -> None:
    """The last member that is connected takes everything about the group off the store."""
    if int(store.add(f"{name}/made", 1)) == size:
        for key in store.list_keys():
            if key.startswith(f"{name}/"):
                store.delete_key(key)


def _members(layout: Layout, digit: Digit, rank: int) -> list[int]:
    stride, ways = digit
    number = layout.number(rank)
    assert number is not None
    first = number - number // stride % ways * stride
    return [layout.rank_of(first + i * stride) for i in range(ways)]
