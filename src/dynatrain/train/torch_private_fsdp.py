"""Every use of FSDP2's private parts, in one place, as :mod:`~dynatrain.train.torch_private` has the others.

``tests/dist/test_torch_private_fsdp.py`` has a test per function.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

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
