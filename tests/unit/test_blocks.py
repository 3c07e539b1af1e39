"""Attention in blocks of keys against attention written down in one formula."""

import pytest
import torch

from dynatrain.models.attend import visible
from dynatrain.models.blocks import block_backward, block_forward, merge_into

B, K, G, Q, KEYS, D, E = 2, 2, 3, 8, 16, 6, 5
STARTS = torch.tensor([[0] * 3 + [3] * 9 + [12] * 4, [0] * 16])
"""The document's first token of each of the keys."""
QUERIES = torch.arange(8, 16)


def operands():
    generator = torch.Generator().manual_seed(1)
    sizes = ((B, K, G, Q, D), (B, K, KEYS, D), (B, K, KEYS, E))
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def seen_keys():
    return visible(QUERIES, torch.arange(KEYS), STARTS)[:, :, None]


def plain(q, k, v):
    scores = torch.einsum("bkgqd,bknd->bkgqn", q, k).masked_fill(~seen_keys(), float("-inf"))
    return torch.einsum("bkgqn,bkne->bkgqe", scores.softmax(-1), v), scores.logsumexp(-1)


def merged(cuts):
    """Result and ``lse`` from the blocks between ``cuts``, in that order."""
    q, k, v = operands()
    out, lse = torch.zeros(B, K, G, Q, E, dtype=torch.float64), torch.full((B, K, G, Q), -torch.inf).double()
    for first, end in cuts:
        part = slice(first, end)
        merge_into(out, lse, *block_forward(q, k[:, :, part], v[:, :, part], seen_keys()[..., part]))
    return out, lse


@pytest.mark.parametrize("cuts", [[(0, 16)], [(0, 3), (3, 16)], [(12, 16), (0, 3), (3, 7), (7, 12)]])
def test_blocks_merge_to_the_whole_in_any_order_also_where_a_query_sees_nothing_of_some(cuts):
    out, lse = merged(cuts)
    expected, expected_lse = plain(*operands())

    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-14)


def test_a_block_of_which_a_query_sees_nothing_weighs_nothing():
    q, k, v = operands()
    nothing = torch.zeros(Q, KEYS, dtype=torch.bool)
    out, lse = block_forward(q, k, v, nothing)

    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    merge_into(out, lse, *block_forward(q, k, v, nothing))  # nor do two of them
    assert (out == 0).all()


def test_gradients_of_blocks_add_up_to_those_of_the_whole():
    q, k, v = (x.requires_grad_() for x in operands())
    out, lse = plain(q, k, v)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = torch.autograd.grad(out, (q, k, v), d_out)
    delta = (out * d_out).sum(-1).detach()
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for first, end in ((0, 3), (3, 16)):
        part = slice(first, end)
        block = (q.detach(), k.detach()[:, :, part], v.detach()[:, :, part], seen_keys()[..., part])
        d_q, d_k, d_v = block_backward(*block, lse.detach(), d_out, delta)
        found[0] += d_q
        found[1][:, :, part] += d_k
        found[2][:, :, part] += d_v

    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)
