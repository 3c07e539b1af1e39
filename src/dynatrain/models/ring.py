"""Ring attention (Liu et al., arXiv 2310.01889): keys and values go from rank to rank; queries stay.

In hop h of P, rank i works on the keys and values of rank i - h, while the next ones are on their way. In the backward
pass they go round once more, and behind them their gradients, to which each rank adds its own; one hop more brings
these home. All messages are point to point, to the next rank and from the one before, and every rank posts them in one
order: receive and send of hop h's keys, of hop h's gradients, of hop h + 1's keys. Nothing waits before it has posted.

Blocks of keys that no query of a chunk may see are skipped: with the zig-zag of ``TokenShare`` every rank works on
2P + 1 pairs of chunks. Sums are in fp32 at least. Nothing as large as t x T is ever held, and no rank holds the keys of
more than three.

Legend of shapes: as in :mod:`dynatrain.models.blocks`; t tokens of this rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dynatrain.models.attend import visible
from dynatrain.models.blocks import block_backward, block_forward, grouped, merge_into, ungrouped
from dynatrain.models.dropped import ROWS, Dropped
from dynatrain.models.share import TokenShare


@dataclass(frozen=True, slots=True)
class RingAttention:
    """Attention over keys and values that go round, as an ``Attend``."""

    share: TokenShare
    group: dist.ProcessGroup

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, dropped: Dropped | None = None
    ) -> Tensor:
        """As of ``Attend``."""
        return _Ring.apply(q, k, v, documents, dropped, self.share, self.group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        dropped: Dropped | None,
        share: TokenShare,
        group: dist.ProcessGroup,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        rows = grouped(q, k.shape[2]).to(wide) * q.shape[-1] ** -0.5
        both = torch.cat((k, v), dim=-1).transpose(1, 2).contiguous()
        out = rows.new_zeros(*rows.shape[:-1], v.shape[-1])
        lse = rows.new_full(rows.shape[:-1], float("-inf"))
        for part, passing in _round(both, group):
            keys, values = passing.to(wide).split((k.shape[-1], v.shape[-1]), dim=-1)
            for at, of, *masks in _blocks(share, part, documents, dropped, rows):
                found = block_forward(rows[..., at, :], keys[..., of, :], values[..., of, :], *masks)
                merge_into(out[..., at, :], lse[..., at], *found)
        mixed = ungrouped(out).to(q.dtype)
        ctx.save_for_backward(q, both, mixed, lse)
        ctx.masks, ctx.share, ctx.group, ctx.sizes = (documents, dropped), share, group, (k.shape[-1], v.shape[-1])
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mixed: Tensor) -> tuple[Tensor | None, ...]:
        q, both, mixed, lse = ctx.saved_tensors
        scale, heads = q.shape[-1] ** -0.5, both.shape[1]
        rows = grouped(q, heads).to(lse.dtype) * scale
        d_out, out = (grouped(x, heads).to(lse.dtype) for x in (d_mixed, mixed))
        delta = (d_out * out).sum(-1)
        d_rows = torch.zeros_like(rows)
        on_its_way: _Message | None = None
        for part, passing in _round(both, ctx.group):
            keys, values = passing.to(lse.dtype).split(ctx.sizes, dim=-1)
            d_both = torch.zeros_like(passing, dtype=lse.dtype)
            d_keys, d_values = d_both.split(ctx.sizes, dim=-1)
            for at, of, seen, factors in _blocks(ctx.share, part, *ctx.masks, rows):
                block = (rows[..., at, :], keys[..., of, :], values[..., of, :], seen)
                found = block_backward(*block, lse[..., at], d_out[..., at, :], delta[..., at], factors)
                for total, share in zip(
                    (d_rows[..., at, :], d_keys[..., of, :], d_values[..., of, :]), found, strict=True
                ):
                    total.add_(share)
            if on_its_way is not None:
                d_both += on_its_way.received()
            on_its_way = _Message(d_both, ctx.group)
        assert on_its_way is not None
        d_k, d_v = on_its_way.received().transpose(1, 2).to(both.dtype).split(ctx.sizes, dim=-1)
        d_q = ungrouped(d_rows * scale).to(q.dtype)
        return d_q, d_k, d_v, None, None, None, None


def _blocks(
    share: TokenShare, part: int, documents: Tensor | None, dropped: Dropped | None, rows: Tensor
) -> Iterator[tuple[slice, slice, Tensor | None, Tensor | None]]:
    """The blocks of this rank's queries and of a part's keys of which something may be seen.

    Yields:
        ``(queries, keys, seen, factors)``: ranges of the tokens on either side, which keys each query sees as of
        ``visible``, None where it is all of them, and what is dropped, as of ``block_forward``.
    """
    heads, local = rows.shape[1:3], rows.shape[3]
    size = local // 2
    mine, theirs = (share.attended(local * share.parts, of, rows.device) for of in (share.part, part))
    for half, chunk in enumerate(share.chunks(share.part)):
        for other_half, other in enumerate(share.chunks(part)):
            if other > chunk:
                continue
            first = other_half * size
            for start in range(half * size, (half + 1) * size, ROWS):
                at = slice(start, min(start + ROWS, (half + 1) * size))
                of = slice(first, first + (size if other < chunk else at.stop - half * size))
                all_seen = documents is None and other < chunk
                seen = None if all_seen else visible(mine[at], theirs[of], documents)
                # Behind the samples' dim come those of the heads.
                seen = seen if seen is None or documents is None else seen[:, :, None]
                factors = None
                if dropped is not None:
                    factors = dropped.factors(heads.numel(), mine[at], theirs[of], rows.dtype).unflatten(1, heads)
                yield at, of, seen, factors


def _round(x: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Every rank's ``x`` and the rank's number, this one's first; the next comes while the caller works."""
    for hop in range(group.size()):
        coming = _Message(x, group) if hop + 1 < group.size() else None
        yield (group.rank() - hop) % group.size(), x
        if coming is not None:
            x = coming.received()


class _Message:
    """A tensor to the next rank of the ring, and one of its shape and type from the rank before, on their way."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        self._sent = sent  # must live until it is sent
        self._received = torch.empty_like(sent)
        before, behind = (group.rank() - 1) % group.size(), (group.rank() + 1) % group.size()
        receive = dist.P2POp(dist.irecv, self._received, group=group, group_peer=before)
        send = dist.P2POp(dist.isend, sent, group=group, group_peer=behind)
        self._works = dist.batch_isend_irecv([receive, send])

    def received(self) -> Tensor:
        """Wait for both."""
        for work in self._works:
            work.wait()
        return self._received
