"""A layout applied to a decoder with PyTorch's own parts: ``parallelize_module``, ``fully_shard``, pipeline parts.

Everything here runs on a model on the meta device and allocates nothing; the parameters' values arrive afterwards.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dynatrain.layout.layout import Layout
from dynatrain.layout.stages import held_stages, stage_ranges
from dynatrain.models.attend import Attend, attend_whole
from dynatrain.models.context import attend_over
from dynatrain.models.decoder import DecoderPart
from dynatrain.models.experts import MixtureOfExperts
from dynatrain.models.keyed import KeyedStream
from dynatrain.models.share import TokenShare
from dynatrain.space.decoder import GPT2, DecoderShape
from dynatrain.train.column_row import column_row
from dynatrain.train.compiled import compile_blocks
from dynatrain.train.expert_parallel import Shared, deal_out, expert_plan, shard_experts
from dynatrain.train.groups import context_group
from dynatrain.train.head_copies import copy_heads
from dynatrain.train.recompute import recompute_blocks
from dynatrain.train.reduction import TreeReduceScatter, tree_all_reduce
from dynatrain.train.step import shared_tokens
from dynatrain.train.torch_private_fsdp import reduce_empty_gradients, share_shard
from dynatrain.train.vocabulary import VocabularyParallel

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
"""Dtype of activations and gathered weights. bf16 keeps fp32 masters (the shards); fp64 holds everything in fp64."""


def master_dtype(compute: str) -> torch.dtype:
    """Dtype of the stored parameters and moments for a compute precision."""
    return torch.float64 if compute == "fp64" else torch.float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """How numbers are held and computed: ``compute`` is a key of :data:`COMPUTE_DTYPE`."""

    compute: str = "fp32"

    def policy(self) -> MixedPrecisionPolicy:
        """FSDP2's policy: compute in bf16 where asked, reduce gradients in the master's dtype."""
        if self.compute != "bf16":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build_parts(
    shape: DecoderShape,
    layout: Layout,
    mesh: DeviceMesh,
    *,
    seed: int,
    precision: Precision,
    recompute: str = "none",
    compile_with: str = "",
) -> list[DecoderPart]:
    """This rank's parts of the decoder under ``layout``: on meta, cut by tp, wrapped by fsdp, reducing in the tree.

    There is one for each of the rank's stages, first stage first; they share one ``KeyedStream``.

    Args:
        shape: the model.
        layout: must be legal for the model.
        mesh: of ``layout``, with all axes.
        seed: of the keyed streams (dropout).
        precision: of parameters and compute.
        recompute: what of each block's forward is computed again in backward, as of ``recompute_blocks``.
        compile_with: backend of ``torch.compile`` for each block, as of ``compile_blocks``; empty for none.
    """
    streams = KeyedStream(seed=seed, share=token_share(layout, mesh), head_part=mesh.get_local_rank("tp"))
    reduce_empty_gradients()
    parts = []
    for stage in held_stages(layout, mesh.get_local_rank("pp")):
        part = _cut_part(shape, layout, mesh, stage, streams, master_dtype(precision.compute))
        compile_blocks(part, layout, compile_with)
        recompute_blocks(part, recompute, halves=bool(layout.schedule))
        _shard(part, layout, mesh["fsdp"], precision)
        _reduce_in_tree(part, layout, mesh["dp"].get_group())
        parts.append(part)
    first, last = parts[0], parts[-1]
    if shape.tie_word_embeddings and None not in {first.embed_tokens, last.lm_head} and first is not last:
        # Both ends of a V: two modules, each gathered and reduced with its part, over one shard.
        share_shard(last, "lm_head.weight", first.embed_tokens.weight)
    return parts


def _cut_part(
    shape: DecoderShape, layout: Layout, mesh: DeviceMesh, stage: int, streams: KeyedStream, dtype: torch.dtype
) -> DecoderPart:
    layers = stage_ranges(layout, shape.num_hidden_layers)[stage]
    with torch.device("meta"):
        part = DecoderPart(
            shape,
            layers,
            first=stage == 0,
            last=stage == layout.num_stages - 1,
            streams=streams,
            attend=_attend(layout, streams.share),
        )
        part.to(dtype)
    if layout.size("tp") > 1:
        parallelize_module(part, mesh["tp"], tensor_plan(part, layout))
        if heads_are_copied(shape, layout):
            copy_heads(part)
        part.tie()
    deal_out(part, layout, mesh["tp"])
    return part


def token_share(layout: Layout, mesh: DeviceMesh) -> TokenShare:
    """Which tokens of each sequence this rank holds."""
    share = shared_tokens(layout, layout.coordinates(dist.get_rank()).cp)
    return replace(share, slices=layout.size("tp"), slice=mesh.get_local_rank("tp")) if layout.sp else share


def _attend(layout: Layout, share: TokenShare) -> Attend:
    return attend_whole if share.parts == 1 else attend_over(layout.cp_method, share, context_group())


def tensor_plan(part: DecoderPart, layout: Layout) -> dict[str, ParallelStyle]:
    """Megatron's column-then-row cut per block; with ``-sp`` norms and residuals hold a slice of the sequence."""
    between = _between(layout)
    plan: dict[str, ParallelStyle] = {}
    if part.embed_tokens is not None:
        plan["embed_tokens"] = VocabularyParallel(out=between)
        if layout.sp and part.embed_positions is not None:
            # Each rank places its own tokens: the weight is a copy whose gradient is a sum over the tp ranks.
            plan["embed_positions"] = SequenceParallel(use_local_output=True)
    if part.lm_head is not None:
        plan["lm_head"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
        if layout.sp:
            plan["norm"] = SequenceParallel()
    heads = ("q_proj",) if heads_are_copied(part.shape, layout) else ("q_proj", "k_proj", "v_proj")
    for number, block in part.layers.items():
        at = f"layers.{number}"
        attention = f"{at}.self_attn"
        if part.shape.latent:
            plan |= _latent_plan(attention, between)
        else:
            plan |= column_row(attention, between, columns=heads, row="o_proj")
        if isinstance(block.mlp, MixtureOfExperts):
            plan |= expert_plan(f"{at}.mlp", between, shared=block.mlp.shared_experts is not None)
        else:
            gate = () if part.shape.family == GPT2 else ("gate_proj",)
            plan |= column_row(f"{at}.mlp", between, columns=(*gate, "up_proj"), row="down_proj")
        if layout.sp:
            plan[f"{at}.input_layernorm"] = SequenceParallel()
            plan[f"{at}.post_attention_layernorm"] = SequenceParallel()
        if part.shape.qk_norm:
            # Each rank normalises its own heads: the weight is a copy whose gradient is a sum over the tp ranks.
            plan[f"{at}.self_attn.q_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
            plan[f"{at}.self_attn.k_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan


def _between(layout: Layout) -> Placement:
    """How the residual stream lies on the tp ranks between blocks."""
    return Shard(1) if layout.sp else Replicate()


def heads_are_copied(shape: DecoderShape, layout: Layout) -> bool:
    """Whether tp ranks are more than key/value heads, and hold copies of them."""
    return shape.latent is None and layout.size("tp") > shape.num_key_value_heads


def _latent_plan(at: str, between: Placement) -> dict[str, ParallelStyle]:
    """Every rank makes the latents of all tokens, and of them its own heads."""
    return {
        at: PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),), use_local_output=True),
        f"{at}.q_b_proj": ColwiseParallel(),
        f"{at}.kv_b_proj": ColwiseParallel(),
        f"{at}.turned_key": Shared(),
        f"{at}.o_proj": RowwiseParallel(output_layouts=between),
    }


def _shard(part: DecoderPart, layout: Layout, mesh: DeviceMesh, precision: Precision) -> None:
    # A zero-bubble backward looks for the gathered weights twice; also on one fsdp rank they are gone after a forward.
    freed_between = layout.zero == 3 and not layout.schedule
    tied_here = (
        part.embed_tokens is not None and part.lm_head is not None and (part.lm_head.weight is part.embed_tokens.weight)
    )
    units: list[nn.Module | list[nn.Module]] = list(part.layers.values())
    if not tied_here:
        if part.embed_tokens is not None:
            positions = [] if part.embed_positions is None else [part.embed_positions]
            units.insert(0, [part.embed_tokens, *positions])
        if part.lm_head is not None:
            units.append([part.norm, part.lm_head])
    options = {"mp_policy": precision.policy(), "reshard_after_forward": freed_between}
    shard_experts(part, layout, **options)
    for unit in units:
        fully_shard(unit, mesh=mesh, **options)
    fully_shard(part, mesh=mesh, **options)
    if layout.zero == 1:
        part.set_reshard_after_backward(False)


def _reduce_in_tree(part: DecoderPart, layout: Layout, dp_group: dist.ProcessGroup) -> None:
    for module in part.modules():
        if isinstance(module, FSDPModule):
            # A factor of 1 and forced sums: mean factors differ per dtype and are applied twice on a mesh of size 1.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_reduce_scatter(TreeReduceScatter())
            if layout.size("dp") > 1:
                module.set_all_reduce_hook(tree_all_reduce(dp_group))
