"""Every use of torch's private parts, in one place; ``tests/dist/test_torch_private.py`` has a test per function.

Checked with torch 2.13. A function here that fails after an upgrade says by its name what the project relies on.
"""

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
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
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


def _fsdp_params(module: nn.Module) -> Iterator[FSDPParam]:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in part._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001
                yield from group.fsdp_params


def takes_means(module: nn.Module) -> bool | None:
    """Whether FSDP2 averages some gradients of ``module`` over its data ranks; None where nothing is wrapped by it.

    It does unless the loop set a divide factor, which then has no data-parallel size in it.
    """
    factors = [
        group.gradient_divide_factor
        for part in module.modules()
        if isinstance(part, FSDPModule)
        for group in part._get_fsdp_state()._fsdp_param_groups  # noqa: SLF001
    ]
    return any(factor is None for factor in factors) if factors else None


def fsdp_settings(unit: FSDPModule) -> tuple[dict[str, Any], dict[str, object]]:
    """What one FSDP2 unit is set to: plain values that :func:`set_fsdp` takes, and the objects that it sends with.

    ``reshard_after_forward`` is None while torch chooses, which it does anew at the first forward.
    """
    state = unit._get_fsdp_state()  # noqa: SLF001
    plain: dict[str, Any] = {}
    held: dict[str, object] = {}
    for group in state._fsdp_param_groups:  # noqa: SLF001
        plain |= {name: getattr(group, attribute) for name, attribute in _FSDP_SETTINGS.items()}
        held |= {name: getattr(group, attribute) for name, attribute in _FSDP_OBJECTS.items()}
        part = group.post_forward_mesh_info  # None where weights stay gathered
        freed = part is not None and (part is group.mesh_info or part.shard_mesh_size)
        plain["reshard_after_forward"] = None if state._auto_reshard_after_forward else freed  # noqa: SLF001
    return plain, held


def set_fsdp(unit: FSDPModule, values: Mapping[str, Any]) -> None:
    """Set one unit, and none inside it, to what :func:`fsdp_settings` told of another one."""
    for name, value in values.items():
        if name == "reshard_after_forward":
            unit.set_reshard_after_forward(value, recurse=False)
            continue
        for group in unit._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001
            setattr(group, _FSDP_SETTINGS[name], value)


_FSDP_SETTINGS = {
    "gradient_divide_factor": "gradient_divide_factor",
    "requires_gradient_sync": "reduce_grads",
    "requires_all_reduce": "all_reduce_grads",
    "reshard_after_backward": "reshard_after_backward",
    "force_sum_reduction_for_comms": "force_sum_reduction_for_comms",
    "unshard_in_backward": "unshard_in_backward",
    "reduce_scatter_unused_params": "reduce_scatter_unused_params",
}
"""Attributes of FSDP2's parameter groups, by the names of the methods that set them."""

_FSDP_OBJECTS = {
    "custom_all_gather": "_all_gather_comm",
    "custom_reduce_scatter": "_reduce_scatter_comm",
    "all_reduce_hook": "_all_reduce_hook",
}


def fsdp_reductions(module: nn.Module) -> dict[int, tuple[tuple[int, ...], ...] | None]:
    """Over which ranks FSDP2 reduces each parameter's gradient: one tuple for each axis of its mesh, by identity.

    None where a hook of the user's goes on with the reduction, over whatever it likes.
    """
    found: dict[int, tuple[tuple[int, ...], ...] | None] = {}
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in part._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001
                mesh = group.mesh_info.mesh
                axes = tuple(tuple(dist.get_process_group_ranks(mesh.get_group(dim))) for dim in range(mesh.ndim))
                hooked = group._all_reduce_hook is not None  # noqa: SLF001
                found |= {id(param.sharded_param): None if hooked else axes for param in group.fsdp_params}
    return found


def unreduced(module: nn.Module) -> set[int]:
    """Identities of the parameters of ``module`` whose gradients FSDP2 still holds whole, to be reduced later."""
    held = set()
    for param in _fsdp_params(module):
        whole = getattr(param, "_unsharded_param", None)
        if param.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
            held.add(id(param.sharded_param))
    return held


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


def drop_gathered(module: nn.Module) -> None:
    """Leave shards alone in a module of FSDP2's whose forward or backward was broken off and never comes to its end.

    ``FSDPModule.reshard`` does nothing in the midst of a forward of what stays gathered until the backward.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in part._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001
                group._training_state = TrainingState.IDLE  # noqa: SLF001
                group.reshard()


def padded_numels(module: nn.Module) -> dict[str, int]:
    """Elements that FSDP2 stores for each sharded parameter of ``module``, padding included, by parameter name.

    FSDP2 pads each shard to the largest one, so that the all-gather is even.
    """
    by_id = {id(param.sharded_param): param for param in _fsdp_params(module)}
    return {
        name: by_id[id(param)].padded_sharded_param_size.numel()
        for name, param in module.named_parameters(remove_duplicate=False)
        if id(param) in by_id
    }


def adopt_padded(module: nn.Module, flat: dict[str, torch.Tensor]) -> None:
    """Tell FSDP2 which padded flat storage lies under the shards that ``load_state_dict(assign=True)`` hands in next.

    Without it a shard that is shorter than its padded storage is silently copied out of the storage it was given.

    Args:
        module: freshly built, before its first forward.
        flat: by name, of the parameters that are handed in; one-dimensional, ``padded_numels`` long; the shard is its
            front part.
    """
    by_id = {id(param.sharded_param): param for param in _fsdp_params(module)}
    for name, param in module.named_parameters(remove_duplicate=False):
        if id(param) in by_id and name in flat:
            by_id[id(param)]._sharded_param_data = flat[name]  # noqa: SLF001


def reduce_empty_gradients() -> None:
    """Have FSDP2 reduce units in which a gradient has no elements; its own packing refuses such tensors.

    They are shards of tp ranks that got no rows. All ranks that reduce with each other have the same ones, and an empty
    tensor takes no place in what is sent. Holds for the process from then on; may be called again.
    """
    if fsdp_collectives.foreach_reduce_scatter_copy_in is not _pack_gradients:
        fsdp_collectives.foreach_reduce_scatter_copy_in = _pack_gradients


def _pack_gradients(grads: list[torch.Tensor], packed: torch.Tensor, world_size: int) -> None:
    if filled := [grad for grad in grads if grad.numel()]:
        _PACK(filled, packed, world_size)


_PACK = fsdp_collectives.foreach_reduce_scatter_copy_in


def share_shard(module: nn.Module, path: str, param: nn.Parameter) -> None:
    """Put ``param``, sharded by FSDP2 in another module, in the place of the parameter at ``path``, sharded alike.

    Both modules then gather from its storage, each for itself, and both add their gradients into its ``.grad``.

    Args:
        module: freshly built, before its first forward.
        path: of the parameter that falls away.
        param: of the same shape on the same mesh.
    """
    old = module.get_parameter(path)
    state = next(state for state in _fsdp_params(module) if state.sharded_param is old)
    owner, _, leaf = path.rpartition(".")
    module.get_submodule(owner).register_parameter(leaf, param)
    state.sharded_param = param


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
    _redistribute._gen_transform_infos.cache_clear()  # noqa: SLF001
    _redistribute.clear_redistribute_planner_cache()
