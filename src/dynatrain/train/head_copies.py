"""More tp ranks than key/value heads: heads are dealt out whole, and neighbouring tp ranks hold copies of one.

A rank's query heads all attend to one key/value head, whose projection the rank holds. The tp ranks are read as two
axes for it, heads x copies: the weight is sharded on the first and replicated on the second. Each copy sees the queries
of its own rank alone, so its gradient is a share of a sum, which FSDP2 takes over the copies before it reduces.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional

from dynatrain.models.decoder import DecoderPart
from dynatrain.train.groups import heads_mesh

SUMMED = (Shard(0), Partial())
"""How the gradient of a head's weight lies over heads x copies: each copy has its own queries' share of a sum."""


def copy_heads(part: DecoderPart) -> None:
    """Give each rank its key/value head in every layer of ``part``, where there are fewer than tp ranks.

    Args:
        part: on meta, cut by tp but for these; mutated.
    """
    heads = heads_mesh(part.shape.num_key_value_heads)
    for block in part.layers.values():
        attention = block.self_attn
        attention.k_proj = _CopiedProjection(attention.k_proj, heads)
        attention.v_proj = _CopiedProjection(attention.v_proj, heads)


class _CopiedProjection(nn.Module):
    """A linear layer of which this rank computes one head, from all tokens.

    Args:
        whole: on meta; its parameters are replaced by their shards.
        heads: this rank's mesh of heads x copies.
    """

    def __init__(self, whole: nn.Linear, heads: DeviceMesh) -> None:
        super().__init__()
        for name, value in (("weight", whole.weight), ("bias", whole.bias)):
            cut = None if value is None else distribute_tensor(value.detach(), heads, [Shard(0), Replicate()])
            self.register_parameter(name, None if cut is None else nn.Parameter(cut))

    def forward(self, x: DTensor) -> torch.Tensor:
        """[B, T, H], whole on each tp rank -> [B, T, D] of this rank's head."""
        tokens = x.to_local(grad_placements=[Partial()])
        weight, bias = (
            None if value is None else value.to_local(grad_placements=SUMMED) for value in (self.weight, self.bias)
        )
        return functional.linear(tokens, weight, bias)
