"""Experts under a layout: dealt out over ep, cut over etp, sharded over what is left of the ranks of fsdp x cp x tp.

Under tp every rank routes its own slice of the tokens, with or without sequence parallelism between the blocks: then
all ranks that experts are spread over bring different rows, and one exchange serves every mix of the axes.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInputOutput

from dynatrain.layout.layout import Layout
from dynatrain.models.decoder import DecoderPart, canonical_name
from dynatrain.models.expert_groups import ExpertGroups
from dynatrain.models.experts import Exchange, GroupedExperts, MixtureOfExperts
from dynatrain.space.decoder import catalogue
from dynatrain.space.ownership import cuts_under
from dynatrain.train.column_row import column_row
from dynatrain.train.groups import context_group, expert_mesh

_ETP_DIM = {"gate_proj": 1, "up_proj": 1, "down_proj": 2}
"""The dim of an expert's width F in each stack."""


def expert_plan(at: str, between: Placement, *, shared: bool) -> dict[str, ParallelStyle]:
    """How tp treats a mixture of experts: as a block on a slice of the tokens.

    Args:
        at: path of the block.
        between: how the residual stream lies between blocks.
        shared: whether the block has experts that every token passes.
    """
    plan: dict[str, ParallelStyle] = {
        at: PrepareModuleInputOutput(
            input_layouts=(between, None),
            desired_input_layouts=(Shard(1), None),
            use_local_input=True,
            output_layouts=Shard(1),
            desired_output_layouts=between,
        ),
        f"{at}.gate": _Copied(),
    }
    if shared:
        plan |= column_row(f"{at}.shared_experts", Shard(1), columns=("gate_proj", "up_proj"), row="down_proj")
    return plan


def deal_out(part: DecoderPart, layout: Layout, tp: DeviceMesh) -> None:
    """Give each rank its experts, or its part of their width, and the way to the others; on meta.

    Args:
        part: on meta.
        layout: of all ranks.
        tp: this rank's tp mesh.
    """
    for block in _mixtures(part):
        spread = [context_group()] if layout.size("cp") > 1 else []
        if layout.size("tp") > 1:
            spread.append(tp.get_group())
        if layout.ep == layout.etp == 1:
            block.exchange = Exchange(spread)
            continue
        mesh = expert_mesh()
        etp = mesh.get_group("etp") if layout.etp > 1 else None
        block.exchange = ExpertGroups(mesh.get_group("ep"), etp, spread)
        _cut(block.experts, layout, mesh)


def _cut(experts: GroupedExperts, layout: Layout, mesh: DeviceMesh) -> None:
    axes = tuple(axis for axis in ("ep", "etp") if layout.size(axis) > 1)
    for name, weight in list(experts.named_parameters(recurse=False)):
        dims = {"ep": 0, "etp": _ETP_DIM[name]}
        cut = distribute_tensor(weight.detach(), mesh[axes], [Shard(dims[axis]) for axis in axes])
        setattr(experts, name, nn.Parameter(cut, requires_grad=weight.requires_grad))


def shard_experts(part: DecoderPart, layout: Layout, **options: Any) -> None:
    """Wrap the experts of each block by ``fully_shard`` on their own axis; before the blocks themselves.

    Args:
        part: with experts dealt out.
        layout: of all ranks.
        options: of ``fully_shard``.
    """
    held = {id(param) for block in _mixtures(part) for param in block.experts.parameters()}
    if not held:
        return
    tensors = {tensor.name: tensor for tensor in catalogue(part.shape, optimizer="")}
    dims = {
        id(param): dict(cuts_under(layout, tensors[canonical_name(part, path)])).get("efsdp", 0)
        for path, param in part.named_parameters()
        if id(param) in held
    }

    def placement(param: nn.Parameter) -> Shard:
        return Shard(dims[id(param)])

    for block in _mixtures(part):
        fully_shard(block.experts, mesh=expert_mesh()["efsdp"], shard_placement_fn=placement, **options)


def _mixtures(part: DecoderPart) -> Iterator[MixtureOfExperts]:
    return (block.mlp for block in part.layers.values() if isinstance(block.mlp, MixtureOfExperts))


class _Copied(ParallelStyle):
    """Every rank holds a copy of the parameters; the module sees to the sum of their gradients."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, weight in list(module.named_parameters(recurse=False)):
            copied = distribute_tensor(weight.detach(), mesh, [Replicate()])
            module.register_parameter(name, nn.Parameter(copied, requires_grad=weight.requires_grad))
        return module


class Shared(ParallelStyle):
    """Ranks use copies of what the module gives, each for its own heads: the gradient is the sum over them."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        group = mesh.get_group()
        module.register_forward_hook(lambda _module, _inputs, output: _Shared.apply(output, group))
        return module


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
