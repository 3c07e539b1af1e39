"""Multi-head latent attention: queries, keys and values made from narrow latents (DeepSeek-V2, arXiv 2405.04434, 2.1).

Keys and values are made whole and go through the same attention as any others. Heads are counted from the local
weights, as in plain attention: a rank with a part of the heads runs the same code on copies of the latents.

Legend of shapes: B samples, T tokens, H hidden size, N local heads; n, r and v as in :class:`Latent`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dynatrain.models.attend import Attend
from dynatrain.models.dropped import AttentionDropout
from dynatrain.space.decoder import DecoderShape

_NORM_EPS = 1e-6
"""Of the latents' norms, whatever the model's own: the published models were trained with it."""


class LatentAttention(nn.Module):
    """Causal latent attention.

    Args:
        shape: with ``latent``.
        rotary: turns [B, T, heads, r], given the documents; the two elements of a pair lie r/2 apart.
        attend: mixes the values.
        drop: what of it is dropped.
    """

    def __init__(
        self,
        shape: DecoderShape,
        rotary: Callable[[Tensor, Tensor | None], Tensor],
        attend: Attend,
        drop: AttentionDropout,
    ) -> None:
        super().__init__()
        assert shape.latent is not None
        sizes = self.sizes = shape.latent
        heads, hidden = shape.num_attention_heads, shape.hidden_size
        self.rotary = rotary
        self.attend = attend
        self.drop = drop
        self.q_a_proj = nn.Linear(hidden, sizes.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(sizes.q_lora_rank, eps=_NORM_EPS)
        self.q_b_proj = nn.Linear(sizes.q_lora_rank, heads * sizes.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, sizes.kv_lora_rank + sizes.qk_rope_head_dim, bias=False)
        self.turned_key = nn.Identity()  # one for all heads: where ranks share them out, its gradient is their sum
        self.kv_a_layernorm = nn.RMSNorm(sizes.kv_lora_rank, eps=_NORM_EPS)
        self.kv_b_proj = nn.Linear(sizes.kv_lora_rank, heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * sizes.v_head_dim, hidden, bias=False)

    def forward(self, x: Tensor, samples: Tensor, documents: Tensor | None = None) -> Tensor:
        """[B, T, H] -> [B, T, H], all tokens that this rank attends from; as of ``DecoderLayer``."""
        q, k, v = self._heads(x, documents)
        return self.o_proj(self.attend(q, k, v, documents, self.drop(samples, q.shape[2])).flatten(2))

    def _heads(self, x: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, T, N, n + r], values [B, T, N, v]."""
        sizes = self.sizes
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (-1, sizes.head_dim))
        q, q_turned = q.split((sizes.qk_nope_head_dim, sizes.qk_rope_head_dim), dim=-1)
        latent, k_turned = self.kv_a_proj_with_mqa(x).split((sizes.kv_lora_rank, sizes.qk_rope_head_dim), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.unflatten(-1, (-1, sizes.qk_nope_head_dim + sizes.v_head_dim))
        k, v = kv.split((sizes.qk_nope_head_dim, sizes.v_head_dim), dim=-1)
        q_turned, k_turned = (
            self.rotary(_apart(x), documents) for x in (q_turned, self.turned_key(k_turned)[..., None, :])
        )
        k_turned = k_turned.expand(-1, -1, k.shape[2], -1)  # one for all heads
        return torch.cat((q, q_turned), dim=-1), torch.cat((k, k_turned), dim=-1), v


def _apart(x: Tensor) -> Tensor:
    """Pairs that lie side by side, in the order that the rotary takes: all first elements, then all second ones.

    Scores do not change, as queries and keys are put in the same order.
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
