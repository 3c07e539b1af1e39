"""Every use of torch's private parts in one place, but FSDP2's (``train/torch_private_fsdp.py``).

``tests/dist/test_torch_private.py`` has a test per function.

Checked with torch 2.13. A function here that fails after an upgrade says by its name what the project relies on.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._python_dispatch import _disable_current_modes


def named_group(
    name: str, members: Sequence[int], me: int, backend: str, store: dist.Store, timeout: timedelta
) -> dist.ProcessGroup:
    """A process group under an explicit name, registered so that ``DeviceMesh.from_group`` accepts it.

    ``dist.new_group`` names groups by a per-process counter: ranks with different histories then wait for each other
    under different names. Only the members call this; it blocks until all of them have, and may run in a thread. It
    needs no default group, and asks none for this process's number: in a world to come it has another one.

    Args:
        name: equal on all members, never used before in this job.
        members: numbers of the ranks in their world, ascending or not; their order is the rank order in the group.
        me: number of this process among them.
        backend: ``gloo`` or ``nccl``.
        store: a store that all members share.
        timeout: of the group's operations.
    """
    group, _ = c10d._new_process_group_helper(  # noqa: SLF001
        len(members),
        members.index(me),
        [],  # as of a default group: else the present one is asked whether this process is a member
        backend,
        dist.PrefixStore(f"{name}/", store),
        group_name=c10d.GroupName(name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}  # noqa: SLF001
    return group


class _Default(c10d._World):  # noqa: SLF001
    """What torch keeps of a process's groups, where a thread may see a default group of its own."""

    @property
    def default_pg(self) -> dist.ProcessGroup | None:
        own = _OWN_DEFAULT.get()
        return self._default_pg if own is None else own

    @default_pg.setter
    def default_pg(self, value: dist.ProcessGroup | None) -> None:
        self._default_pg = value


_OWN_DEFAULT: ContextVar[dist.ProcessGroup | None] = ContextVar("own_default", default=None)


@contextmanager
def own_default(group: dist.ProcessGroup) -> Iterator[None]:
    """Inside it this thread, and no other, has ``group`` for the default group, and its rank there for its own.

    Modules of a world to come are built beside training: meshes, their slices, pipeline stages and the user's build ask
    for the rank of this process, and the answer must be that of the world to come.
    """
    c10d._world.__class__ = _Default  # noqa: SLF001
    token = _OWN_DEFAULT.set(group)
    try:
        yield
    finally:
        _OWN_DEFAULT.reset(token)


def swap_default(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Make ``group`` the default group, which renumbers this process; 0.1 ms, and the old one stays usable.

    What DTensor has cached of meshes with equal ranks names the groups of the other world: it is forgotten.

    Returns:
        The default group before; None where there was none.
    """
    before: dist.ProcessGroup | None = c10d._world.default_pg  # noqa: SLF001
    c10d._update_default_pg(group)  # noqa: SLF001
    clear_dtensor_caches()
    return before


def process_groups() -> list[dist.ProcessGroup]:
    """All groups of more than one member that this process is in and has not destroyed, whoever made them."""
    return [group for group in list(c10d._world.pg_map) if group.size() > 1]  # noqa: SLF001


def default_store() -> dist.Store:
    """The store behind the default group, over a connection of its own; under torchrun it lives in the launcher.

    A process group that is being made waits inside the store for its peers, and whoever shares its connection waits
    with it.
    """
    return c10d._get_default_store().clone()  # noqa: SLF001


def scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a learning-rate scheduler hangs on ``optimizer``: it has marked the step method."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


@dataclass(frozen=True, slots=True)
class Hook:
    """A registered hook.

    Attributes:
        number: torch's, unique in this process.
        kind: where torch keeps it.
        call: the hook.
        register: method of the owner that registers another one of its kind; empty where there is none for sure.
        options: of that registration.
    """

    number: int
    kind: str
    call: Callable[..., object]
    register: str
    options: Mapping[str, bool]

    def __str__(self) -> str:
        return f"{getattr(self.call, '__qualname__', type(self.call).__name__)} ({self.kind.strip('_')})"


_REGISTER = {
    "_forward_hooks": "register_forward_hook",
    "_forward_pre_hooks": "register_forward_pre_hook",
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
    "_state_dict_hooks": "",
    "_state_dict_pre_hooks": "",
    "_load_state_dict_pre_hooks": "",
    "_load_state_dict_post_hooks": "",
    "_optimizer_step_pre_hooks": "register_step_pre_hook",
    "_optimizer_step_post_hooks": "register_step_post_hook",
    "_optimizer_state_dict_pre_hooks": "",
    "_optimizer_state_dict_post_hooks": "",
    "_optimizer_load_state_dict_pre_hooks": "",
    "_optimizer_load_state_dict_post_hooks": "",
    "_post_accumulate_grad_hooks": "",
}


def hooks_of(owner: nn.Module | torch.optim.Optimizer | torch.Tensor) -> list[Hook]:
    """The hooks on a module, an optimizer or a tensor, in the order in which they run."""
    found = []
    own = vars(owner)
    for kind, register in _REGISTER.items():
        # A module looks what it has not up among its parameters and submodules, and there are hundreds of modules.
        held = own.get(kind) if "_forward_hooks" in own else getattr(owner, kind, None)
        for number, call in (held or {}).items():
            options = {}
            for option in ("with_kwargs", "always_call"):
                listed = getattr(owner, f"{kind}_{option.replace('always_call', 'always_called')}", None)
                if listed is not None:
                    options[option] = number in listed
            old_style = kind == "_backward_hooks" and not getattr(owner, "_is_full_backward_hook", False)
            found.append(Hook(number, kind, call, "" if old_style else register, options))
    return found


def times_written(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was written in place, by any of its views."""
    return tensor._version  # noqa: SLF001


def set_buffer(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put ``value`` itself in the place of a buffer: persistent or not, and on meta or not, it stays what it was."""
    module._buffers[name] = value  # noqa: SLF001


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor without a graph node, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()  # noqa: SLF001


def shard_of(template: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor laid out over ranks like ``template``, over this rank's ``local`` shard.

    ``DTensor.from_local`` works out anew what the template knows already, 0.1 ms for each tensor inside the stall.
    """
    return DTensor(local, template._spec, requires_grad=False)  # noqa: SLF001


def without_modes() -> AbstractContextManager[Any]:
    """Operators inside are seen by no dispatch mode that is on outside, selective checkpointing's among them."""
    return _disable_current_modes()


class Lasting(AbstractContextManager[None]):
    """The second of selective checkpointing's contexts, entered once for each half of a backward.

    torch's own hands each kept result out once, because it takes a second backward for a mistake.

    Args:
        mode: the second of ``create_selective_checkpoint_contexts``.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._kept = mode.storage  # {operator: {how often it ran before: result}}, which the first context fills

    def __enter__(self) -> None:
        self._mode.storage = {key: dict(results) for key, results in self._kept.items()}
        self._mode.__enter__()

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)


def clear_dtensor_caches() -> None:
    """Forget the sharding decisions that name process groups, before those groups are destroyed.

    DTensor's caches return specs that hold the first mesh that compared equal, with its old groups.
    """
    from torch.distributed.tensor import _redistribute, debug  # noqa: PLC0415

    debug._clear_sharding_prop_cache()  # noqa: SLF001
    if isinstance(decide := _propagator().propagate_op_sharding_non_cached, _Decisions):
        decide.known.clear()
    _redistribute._gen_transform_infos.cache_clear()  # noqa: SLF001
    _redistribute.clear_redistribute_planner_cache()


class _Decisions:
    """What ``decide`` said inside :func:`sharing_decisions`, for all threads: torch keeps it for each one alone."""

    def __init__(self, decide: Callable[[OpSchema], Any]) -> None:
        self.decide = decide
        self.known: dict[OpSchema, Any] = {}
        self.sharing: set[int] = set()

    def __call__(self, schema: OpSchema) -> Any:
        if _are_we_tracing():  # sizes are symbols then
            return self.decide(schema)
        found = self.known.get(schema)
        if found is None:
            found = self.decide(schema)
            # Not outside: some updates have a number of the step in what they ask, and never ask it again.
            if threading.get_ident() in self.sharing:
                self.known[schema] = found
        return found


def _propagator() -> Any:
    return DTensor._op_dispatcher.sharding_propagator  # noqa: SLF001


@contextmanager
def sharing_decisions() -> Iterator[None]:
    """What DTensor decides inside, in this thread, holds in all threads from then on, until the caches are cleared.

    How an operator's results are laid out is worked out at its first call with such inputs, which takes milliseconds
    for each tensor of a foreach update, and is remembered for the calling thread.
    """
    propagator = _propagator()
    if not isinstance(propagator.propagate_op_sharding_non_cached, _Decisions):
        propagator.propagate_op_sharding_non_cached = _Decisions(propagator.propagate_op_sharding_non_cached)
    sharing, me = propagator.propagate_op_sharding_non_cached.sharing, threading.get_ident()
    sharing.add(me)
    try:
        yield
    finally:
        sharing.discard(me)


def takes_foreach(params: list[torch.Tensor]) -> bool:
    """Whether an optimizer that was not told would update ``params`` all at once."""
    return bool(_default_to_fused_or_foreach(params, differentiable=False)[1])


_ONE_FOR_ALL_THREADS: dict[str, tuple[str, Callable[[], Any]]] = {
    "_set_default_dtype": ("default dtype", torch.get_default_dtype),
    "_set_default_tensor_type": ("default dtype", torch.get_default_dtype),
    "_set_deterministic_algorithms": ("deterministic algorithms", torch.are_deterministic_algorithms_enabled),
    "_set_float32_matmul_precision": ("float32 matmul precision", torch.get_float32_matmul_precision),
}
"""What torch's own setters call, by name, with what it sets and how that is read."""


@contextmanager
def set_for_a_while() -> Iterator[list[str]]:
    """Watch what the calling thread sets of what torch has once for all threads.

    Yields:
        From the end on, what was set to other values than it has then, with these; so what stays set is none of it.
    """
    caller, told = threading.get_ident(), list[str]()
    seen: dict[str, list[Any]] = {}
    setters = {name: getattr(torch._C, name) for name in _ONE_FOR_ALL_THREADS}  # noqa: SLF001

    def watched(name: str) -> Callable[..., None]:
        what, read = _ONE_FOR_ALL_THREADS[name]

        def call(*args: Any, **more: Any) -> None:
            setters[name](*args, **more)
            if threading.get_ident() == caller:
                seen.setdefault(what, []).append(read())

        return call

    for name in setters:
        setattr(torch._C, name, watched(name))  # noqa: SLF001
    try:
        yield told
    finally:
        for name, setter in setters.items():
            setattr(torch._C, name, setter)  # noqa: SLF001
        after = {what: read() for what, read in _ONE_FOR_ALL_THREADS.values()}
        told += [f"{what} to {value}" for what, values in seen.items() for value in values if value != after[what]]
