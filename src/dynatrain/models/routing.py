"""Which experts each token is sent to, and what keeps their load even.

Two ways to balance the load, both the same in every layout. The *loss* is DeepSeek-V3's of each sequence (arXiv
2412.19437, eq. 17 to 20), for every gate: alpha x sum over experts of f P, where f is the share of the sequence's
tokens that were sent to the expert (1 for an even load), and P the mean share of the scores. Its gradient is added in
backward, weighed like the sequence's tokens, for each layer; the reported loss is without it. The *bias* (eq. 16) is
for the sigmoid gate: see :func:`balance`.

Legend of shapes: B samples, T tokens, H hidden size, E experts, K experts of a token.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

from dynatrain.space.blocks import SIGMOID, Experts


class Router(nn.Module):
    """Chooses each token's experts, and their weights.

    With the sigmoid gate it has two buffers: ``e_score_correction_bias`` [E], added to the scores for the choice alone,
    and ``tokens_per_expert`` int64 [E], what was sent to each expert since the last :func:`balance`.
    """

    def __init__(self, hidden_size: int, sizes: Experts) -> None:
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.empty(sizes.num_experts, hidden_size))
        nn.init.normal_(self.weight, std=0.02)
        biased = sizes.gate == SIGMOID
        self.register_buffer("e_score_correction_bias", torch.zeros(sizes.num_experts) if biased else None)
        self.register_buffer("tokens_per_expert", torch.zeros(sizes.num_experts).long() if biased else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, H] -> scores [B, T, E], in fp32 at least; chosen experts, ascending, and their weights [B, T, K]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = functional.linear(x.to(wide), _copy_of(self.weight).to(wide))
        scores = logits.sigmoid() if self.sizes.gate == SIGMOID else logits.softmax(-1)
        chosen = self._chosen(scores.detach())
        weights = scores.gather(-1, chosen)
        if self.sizes.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return scores, chosen, weights * self.sizes.routed_scaling_factor

    def _chosen(self, scores: Tensor) -> Tensor:
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if self.sizes.n_group > 1:
            grouped = scores.unflatten(-1, (self.sizes.n_group, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.sizes.topk_group, dim=-1).indices
            closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, value=False)
            scores = grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)
        return scores.topk(self.sizes.num_experts_per_tok, dim=-1).indices.sort(-1).values


def _copy_of(weight: Tensor) -> Tensor:
    """A weight of which ranks with other tokens hold copies: its gradient is the sum over them."""
    if not isinstance(weight, DTensor):
        return weight
    return weight.to_local(grad_placements=[Partial()] * weight.device_mesh.ndim)


def balance_loss(scores: Tensor, counts: Tensor) -> Tensor:
    """Sum, over the tokens at hand, of what each adds to the balance loss of its sequence; alpha is left out.

    The mean over a sequence's tokens is eq. 17 of DeepSeek-V3; 1 where all experts are used evenly.

    Args:
        scores: [B, T, E] of these tokens; zeros for tokens that do not count.
        counts: int64 [B, E], tokens of each whole sequence that were sent to each expert.
    """
    sent = counts.to(scores.dtype)  # integers divided by integers would be single precision
    load = sent / sent.sum(-1, keepdim=True).clamp(min=1) * counts.shape[-1]
    share = scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    return (load[:, None] * share).sum()


@torch.no_grad()
def balance(part: nn.Module, total: Callable[[Tensor], Tensor], rate: float) -> None:
    """Move the bias of every router of ``part`` against its load, once after each optimizer step; zero its counters.

    An expert that was sent more than the mean becomes less likely by ``rate``, one that was sent less, more likely.

    Args:
        part: of the model.
        total: sums counts, int64 [routers, E], over the ranks that routed tokens of this step through the same routers;
            called once, and by all of them alike.
        rate: gamma of DeepSeek-V3, which used 0.001.
    """
    for router, sent in _totals(part, total):
        # In whole numbers: the mean times E, so that a load at the mean moves nothing.
        over = (sent * len(sent) - sent.sum()).sign()
        router.e_score_correction_bias -= rate * over.to(router.e_score_correction_bias.dtype)
        router.tokens_per_expert.zero_()


@torch.no_grad()
def loads(part: nn.Module, total: Callable[[Tensor], Tensor]) -> Tensor | None:
    """What :func:`balance` asks ``total`` for, before the step's update; None where there is nothing to balance."""
    routers = _biased(part)
    return total(torch.stack([router.tokens_per_expert for router in routers])) if routers else None


@torch.no_grad()
def total_counts(part: nn.Module, total: Callable[[Tensor], Tensor]) -> None:
    """Where a part of a step ends: let each counter hold the count of all ranks, as copies must that a switch moves.

    Args:
        part: of the model.
        total: as for :func:`balance`.
    """
    for router, sent in _totals(part, total):
        router.tokens_per_expert.copy_(sent)


@torch.no_grad()
def drop_counts(part: nn.Module) -> None:
    """Behind :func:`total_counts`, on all ranks but one of those that :func:`balance` sums over."""
    for router in _biased(part):
        router.tokens_per_expert.zero_()


def _biased(part: nn.Module) -> list[Router]:
    return [module for module in part.modules() if isinstance(module, Router) and module.sizes.gate == SIGMOID]


def _totals(part: nn.Module, total: Callable[[Tensor], Tensor]) -> Iterator[tuple[Router, Tensor]]:
    if routers := _biased(part):
        yield from zip(routers, total(torch.stack([router.tokens_per_expert for router in routers])), strict=True)


class Beside(torch.autograd.Function):
    """Weights, passed on. Backward adds the gradient of a loss, and counts: once, also where forward is repeated."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor | None, counters: Tensor | None, counts: Tensor) -> Tensor:
        """``weights``; ``counts`` are added to ``counters`` in backward."""
        ctx.loss, ctx.counters, ctx.counts = None if loss is None else torch.ones_like(loss), counters, counts
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """The gradient as it comes, and 1 for the loss."""
        if ctx.counters is not None:
            ctx.counters += ctx.counts
        return gradient, ctx.loss, None, None


def counted(chosen: Tensor, experts: int) -> Tensor:
    """How often each number stands in each row: int64 [B, any] -> int64 [B, E]."""
    return chosen.new_zeros(len(chosen), experts).scatter_add(1, chosen, torch.ones_like(chosen))
