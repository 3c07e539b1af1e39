"""Attention of which some probabilities are dropped, by masks that are a function of logical place alone.

Torch's own attention drops by a generator, whose numbers depend on how heads and tokens are cut over ranks. So here
probabilities are explicit, block by block: with P of :mod:`dynatrain.models.blocks`, and M being 0 where a probability
is dropped and 1 / (1 - p) elsewhere::

    out = (P * M) V;  dV = (P * M)^T d_out;  dS = P * (M * (d_out V^T) - delta)

``lse`` is of all probabilities, and ``delta`` is still ``sum(out * d_out)``, so blocks merge as they do without. Masks
are computed again in backward, and nothing as large as all queries by all keys is held.

Legend of shapes: as in :mod:`dynatrain.models.attend`; q queries, k keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dynatrain.models.blocks import block_backward, block_forward, grouped, ungrouped
from dynatrain.models.keyed import KeyedStream, keep_pairs, place_key

ROWS = 512
"""Queries of one block: what bounds the memory of its scores."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """What one layer's attention drops at one step.

    Attributes:
        key: of the layer's place at that step.
        p: share of probabilities that become zero, in (0, 1).
        samples: global numbers, int64 [B].
        first_head: global number of the first of the query heads at hand.
    """

    key: tuple[int, int]
    p: float
    samples: Tensor
    first_head: int

    def of_heads(self, first: int) -> Self:
        """Of the heads from number ``first`` of these on."""
        return replace(self, first_head=self.first_head + first)

    def factors(self, heads: int, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """M [B, heads, q, k] between tokens of these numbers, int64 [q] and [k]."""
        numbers = torch.arange(self.first_head, self.first_head + heads, device=queries.device)
        kept = keep_pairs(self.key, self.p, samples=self.samples, heads=numbers, queries=queries, keys=keys)
        return kept.to(dtype) * (1 / (1 - self.p))


class AttentionDropout(nn.Module):
    """Says what a layer's attention drops; nothing in eval mode and where ``p`` is 0.

    Args:
        p: share of probabilities that become zero, in [0, 1).
        place: logical place, unique in the model and equal in every layout.
        stream: shared by all modules of the part.
    """

    def __init__(self, p: float, place: str, stream: KeyedStream) -> None:
        super().__init__()
        self.p = p
        self.place = place
        self.stream = stream

    def forward(self, samples: Tensor, heads: int) -> Dropped | None:
        """For ``samples`` [B] (global), and so many query heads on this rank."""
        if self.p == 0 or not self.training:
            return None
        return Dropped(place_key(self.stream, self.place), self.p, samples, self.stream.head_part * heads)

    def extra_repr(self) -> str:
        """Rate and place, for ``print(model)``."""
        return f"p={self.p}, place={self.place!r}"


def attend_dropped(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, dropped: Dropped, queries: Tensor, keys: Tensor
) -> Tensor:
    """As ``attend_where``, of tokens with these numbers."""
    return _Dropping.apply(q, k, v, seen, dropped, queries, keys)


class _Dropping(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, dropped: Dropped, queries: Tensor, keys: Tensor
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        rows, of_keys, values = _operands(q, k, v, wide)
        out = rows.new_empty(*rows.shape[:-1], v.shape[-1])
        lse = rows.new_empty(rows.shape[:-1])
        for at, visible, factors in _blocks(rows, seen, dropped, queries, keys):
            out[..., at, :], lse[..., at] = block_forward(rows[..., at, :], of_keys, values, visible, factors)
        mixed = ungrouped(out).to(q.dtype)
        ctx.save_for_backward(q, k, v, mixed, lse, seen)
        ctx.where = dropped, queries, keys
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mixed: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mixed, lse, seen = ctx.saved_tensors
        rows, of_keys, values = _operands(q, k, v, lse.dtype)
        d_out, out = (grouped(x, k.shape[2]).to(lse.dtype) for x in (d_mixed, mixed))
        delta = (d_out * out).sum(-1)
        d_rows, d_keys, d_values = (torch.zeros_like(x) for x in (rows, of_keys, values))
        for at, visible, factors in _blocks(rows, seen, *ctx.where):
            block = (rows[..., at, :], of_keys, values, visible)
            found = block_backward(*block, lse[..., at], d_out[..., at, :], delta[..., at], factors)
            for total, share in zip((d_rows[..., at, :], d_keys, d_values), found, strict=True):
                total.add_(share)
        d_q = ungrouped(d_rows * q.shape[-1] ** -0.5).to(q.dtype)
        return d_q, d_keys.transpose(1, 2).to(k.dtype), d_values.transpose(1, 2).to(v.dtype), None, None, None, None


def _operands(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled queries, keys and values as :func:`block_forward` takes them."""
    rows = grouped(q, k.shape[2]).to(dtype) * q.shape[-1] ** -0.5
    return rows, k.transpose(1, 2).to(dtype), v.transpose(1, 2).to(dtype)


def _blocks(
    rows: Tensor, seen: Tensor, dropped: Dropped, queries: Tensor, keys: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Ranges of queries, which keys each sees (``seen`` is as of ``visible``), and M [B, K, G, q, k]."""
    heads = rows.shape[1:3]
    for start in range(0, len(queries), ROWS):
        at = slice(start, start + ROWS)
        factors = dropped.factors(heads.numel(), queries[at], keys, rows.dtype).unflatten(1, heads)
        visible = seen[..., at, :]
        yield at, visible if seen.ndim == 2 else visible[:, :, None], factors
