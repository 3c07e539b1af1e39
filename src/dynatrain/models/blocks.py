"""Attention in blocks of keys: each block's part of the result, how parts are merged, and each block's gradients.

A block gives its queries ``out = softmax(S) V`` and ``lse = log(sum(exp(S)))`` over its own keys, S being scores. Two
disjoint sets of keys merge exactly::

    lse = log(exp(lse1) + exp(lse2));  out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)

A query that sees no key of a block has ``lse`` -inf and weighs nothing. Backward needs only the merged ``lse`` and
``delta = sum(out * d_out)`` over a value's elements (Dao, "FlashAttention-2", arXiv 2307.08691, section 3.1.1)::

    P = exp(S - lse);  dV = P^T d_out;  dS = P * (d_out V^T - delta);  dQ = dS K;  dK = dS^T Q

It is written out in matrix products, because no public operation of torch gives ``lse`` in fp64 or under a mask, nor
takes it back. All is computed in the type of the operands: the caller gives fp32 at least.

Legend of shapes: as in :mod:`dynatrain.models.attend`; G = N / K query heads to each key/value head, q queries, k keys.
"""

import torch
from torch import Tensor


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One block's ``out`` [B, K, G, q, E] and ``lse`` [B, K, G, q].

    Args:
        q: queries [B, K, G, q, D], scaled.
        k: keys [B, K, k, D].
        v: values [B, K, k, E].
        seen: bool, of a shape that expands to [B, K, G, q, k]; None where every query sees every key.
        factors: what drops probabilities, [B, K, G, q, k]: see :mod:`dynatrain.models.dropped`; None drops nothing.
    """
    scores = _scores(q, k, seen)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - _finite(lse)[..., None])
    return _times(weights if factors is None else weights.mul_(factors), v), lse


def block_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    lse: Tensor,
    d_out: Tensor,
    delta: Tensor,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One block's gradients of q, k and v.

    Args:
        q: as of :func:`block_forward`.
        k: as of :func:`block_forward`.
        v: as of :func:`block_forward`.
        seen: as of :func:`block_forward`.
        lse: over all keys of all blocks.
        d_out: gradient of the merged result [B, K, G, q, E].
        delta: [B, K, G, q].
        factors: as of :func:`block_forward`.
    """
    weights = torch.exp(_scores(q, k, seen) - lse[..., None])
    d_weights = _times(d_out, v.mT)
    used = weights
    if factors is not None:
        d_weights, used = d_weights.mul_(factors), weights * factors
    d_scores = weights * (d_weights - delta[..., None])
    return _times(d_scores, k), _summed(d_scores, q), _summed(used, d_out)


def grouped(x: Tensor, heads: int) -> Tensor:
    """[B, t, N, D] -> [B, K, G, t, D] for K heads of keys."""
    return x.transpose(1, 2).unflatten(1, (heads, -1))


def ungrouped(x: Tensor) -> Tensor:
    """[B, K, G, t, D] -> [B, t, N, D]."""
    return x.flatten(1, 2).transpose(1, 2)


def merge_into(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block's part to ``out`` [..., q, E] and ``lse`` [..., q] of other keys, in place; at first 0 and -inf."""
    both = torch.logaddexp(lse, block_lse)
    base = _finite(both)
    out.mul_(torch.exp(lse - base)[..., None])
    out.addcmul_(block_out, torch.exp(block_lse - base)[..., None])
    lse.copy_(both)


def _scores(q: Tensor, k: Tensor, seen: Tensor | None) -> Tensor:
    scores = _times(q, k.mT)
    return scores if seen is None else scores.masked_fill_(~seen, float("-inf"))


def _finite(lse: Tensor) -> Tensor:
    """``lse``, with 0 where no key was seen: -inf less itself is not a number, less 0 it stays what it is."""
    return lse.masked_fill(lse == float("-inf"), 0)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """[B, K, G, q, m] times [B, K, m, n]: the G heads are rows of one product, so that y is not repeated."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def _summed(x: Tensor, y: Tensor) -> Tensor:
    """[B, K, G, q, k] and [B, K, G, q, m] -> [B, K, k, m], the sum over all rows of the G heads."""
    return x.flatten(2, 3).mT @ y.flatten(2, 3)
