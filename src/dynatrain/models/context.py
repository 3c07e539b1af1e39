"""Context parallel attention: every rank of a group holds a share of the tokens of each sequence.

Three ways, each an :data:`~dynatrain.models.attend.Attend` that equals the single process, forward and backward:

- :class:`GatheredAttention`: all keys and values are gathered, queries stay. Two collectives, memory for all keys.
- :class:`UlyssesAttention`: tokens are exchanged for heads (Jacobs et al., arXiv 2309.14509): each rank has all tokens
  of some heads. Least bytes, but no more ranks than heads.
- :class:`~dynatrain.models.ring.RingAttention`: keys and values go round, point to point. No rank holds all of them.

Legend of shapes: as in :mod:`dynatrain.models.attend`; P ranks of the group, t = T / P.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dynatrain.models.attend import Attend, attend_where, attend_whole, visible
from dynatrain.models.dropped import Dropped, attend_dropped
from dynatrain.models.ring import RingAttention
from dynatrain.models.share import TokenShare


def attend_over(way: str, share: TokenShare, group: dist.ProcessGroup) -> Attend:
    """Attention over the ranks of a group.

    Args:
        way: a key of :data:`WAYS`.
        share: of this rank.
        group: the ranks that share a sequence, in the order of their parts.
    """
    assert (group.size(), group.rank()) == (share.parts, share.part)
    if share.parts == 1:
        return attend_whole
    return WAYS[way](share, group)


@dataclass(frozen=True, slots=True)
class GatheredAttention:
    """Attention over gathered keys and values."""

    share: TokenShare
    group: dist.ProcessGroup

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, dropped: Dropped | None = None
    ) -> Tensor:
        """As of ``Attend``. Each of the two chunks of queries is given the keys up to its own end."""
        tokens = q.shape[1] * self.share.parts
        gathered = _Gather.apply(torch.cat((k, v), dim=-1), self.group)
        keys, values = _in_order(gathered, self.share).split((k.shape[-1], v.shape[-1]), dim=-1)
        size = q.shape[1] // 2
        mine = self.share.attended(tokens, device=q.device)
        mixed = []
        for half, chunk in enumerate(self.share.chunks(self.share.part)):
            rows, end = slice(half * size, (half + 1) * size), (chunk + 1) * size
            numbers = mine[rows], torch.arange(end, device=q.device)
            some = q[:, rows], keys[:, :end], values[:, :end], visible(*numbers, documents)
            mixed.append(attend_where(*some) if dropped is None else attend_dropped(*some, dropped, *numbers))
        return torch.cat(mixed, dim=1)


@dataclass(frozen=True, slots=True)
class UlyssesAttention:
    """Attention of all tokens, over a share of the heads.

    Key/value heads that the ranks do not divide are repeated until they do; the gradient of a head is the sum over its
    copies.
    """

    share: TokenShare
    group: dist.ProcessGroup

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, dropped: Dropped | None = None
    ) -> Tensor:
        """As of ``Attend``.

        Raises:
            ValueError: the ranks do not divide the query heads.
        """
        parts, heads = self.share.parts, q.shape[2]
        if heads % parts:
            near = sorted((i for i in range(1, heads + 1) if heads % i == 0), key=lambda i: (abs(i - parts), i))[:2]
            raise ValueError(
                f"{parts} ranks of ulysses attention do not divide {heads} query heads; nearest: "
                f"{' or '.join(map(str, sorted(near)))} ranks"
            )
        copies = math.lcm(k.shape[2], parts) // k.shape[2]
        k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
        # [B, t, heads, size] -> [P, B, t, heads / P * size], in one message
        cut = [x.unflatten(2, (parts, -1)).movedim(2, 0).flatten(3) for x in (q, k, v)]
        whole = _in_order(_Exchange.apply(torch.cat(cut, dim=-1), self.group), self.share)
        shares = whole.split([x.shape[-1] for x in cut], dim=-1)
        q, k, v = (mine.unflatten(2, (-1, x.shape[3])) for mine, x in zip(shares, (q, k, v), strict=True))
        mine = None if dropped is None else dropped.of_heads(self.share.part * q.shape[2])
        return self._back(attend_whole(q, k, v, documents, mine))

    def _back(self, mixed: Tensor) -> Tensor:
        """[B, T, N / P, E], this rank's heads -> [B, t, N, E], this rank's tokens."""
        by_part = [self.share.attended(mixed.shape[1], part, mixed.device) for part in range(self.share.parts)]
        sent = torch.stack([mixed[:, tokens] for tokens in by_part])
        return _Exchange.apply(sent, self.group).movedim(0, 2).flatten(2, 3)


WAYS = {"gather": GatheredAttention, "ulysses": UlyssesAttention, "ring": RingAttention}
"""Ways of context parallel attention, by name."""


def _in_order(parts: Tensor, share: TokenShare) -> Tensor:
    """[P, B, t, ...], each rank's tokens -> [B, T, ...], all tokens in order."""
    tokens = parts.shape[0] * parts.shape[2]
    held = torch.cat([share.attended(tokens, part, parts.device) for part in range(share.parts)])
    return parts.movedim(0, 1).flatten(1, 2)[:, held.argsort()]


class _Exchange(torch.autograd.Function):
    """[P, ...] -> [P, ...]: entry i goes to rank i; what comes from rank i becomes entry i. So do the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    """[...] -> [P, ...]: every rank's; a rank's gradient is the sum of all ranks', in one order and fp32 at least."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered.unflatten(0, (group.size(), -1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = torch.promote_types(grad.dtype, torch.float32)
        return _exchanged(grad, ctx.group).sum(0, dtype=wide).to(grad.dtype), None


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received
