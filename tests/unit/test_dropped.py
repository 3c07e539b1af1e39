"""Attention whose probabilities are dropped by place: the formula, its gradients, and any part of it alone."""

import pytest
import torch
from tests import oracle

from dynatrain.models import dropped
from dynatrain.models.attend import attend_whole
from dynatrain.models.dropped import AttentionDropout
from dynatrain.models.keyed import KeyedStream, keep_pairs

B, T, N, K, D = 3, 20, 4, 2, 6
P, PLACE = 0.4, "layers.1.self_attn.probabilities"
SAMPLES = torch.tensor([7, 2**31 + 5, 0])


def drop(part=0, heads=N):
    return AttentionDropout(P, PLACE, KeyedStream(seed=11, step=5, head_part=part))(SAMPLES, heads)


def operands():
    generator = torch.Generator().manual_seed(3)
    sizes = ((B, T, N, D), (B, T, K, D), (B, T, K, D), (B, T, N, D))
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def learnt(attend):
    """The result, and the gradients of q, k and v."""
    *inputs, d_out = operands()
    inputs = [x.requires_grad_() for x in inputs]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def plain(q, k, v):
    q, k, v = (x.repeat_interleave(N // x.shape[2], dim=2).transpose(1, 2) for x in (q, k, v))
    return oracle.attention(q, k, v, P, "11/5", PLACE, SAMPLES).unflatten(2, (N, D))


@pytest.mark.parametrize("rows", [512, 7])
def test_it_is_the_stated_formula_and_so_are_its_gradients(rows, monkeypatch):
    monkeypatch.setattr(dropped, "ROWS", rows)
    found = learnt(lambda *inputs: attend_whole(*inputs, None, drop()))

    for mine, expected in zip(found, learnt(plain), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-13)


def test_a_rank_with_a_part_of_the_heads_drops_what_the_whole_drops():
    q, k, v, _ = operands()
    whole = attend_whole(q, k, v, None, drop())
    part = attend_whole(q[:, :, 2:], k[:, :, 1:], v[:, :, 1:], None, drop(part=1, heads=2))

    torch.testing.assert_close(part, whole[:, :, 2:], rtol=0, atol=1e-14)


def test_packed_documents_see_their_own_alone():
    q, k, v, _ = operands()
    starts = torch.tensor([[0] * 8 + [8] * 12]).expand(B, -1)
    changed = torch.cat((v[:, :8] + 1, v[:, 8:]), dim=1)
    found = [attend_whole(q, k, values, starts, drop()) for values in (v, changed)]

    assert torch.equal(found[0][:, 8:], found[1][:, 8:])
    assert not torch.equal(found[0][:, :8], found[1][:, :8])


def test_any_box_has_the_bits_of_the_whole_mask_and_the_kept_share_is_near():
    numbers = {
        "samples": torch.arange(9),
        "heads": torch.arange(6),
        "queries": torch.arange(40),
        "keys": torch.arange(50),
    }
    whole = keep_pairs((1, 2), P, **numbers)
    box = {"samples": [4, 2], "heads": [5], "queries": range(3, 30), "keys": range(17, 50)}
    part = keep_pairs((1, 2), P, **{name: torch.tensor(list(of)) for name, of in box.items()})

    assert torch.equal(part, whole[[4, 2]][:, [5], 3:30, 17:])
    for dims in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3)):
        share = whole.double().mean(dims)
        size = whole.numel() / share.numel()
        assert (share - (1 - P)).abs().max() < 5 * (P * (1 - P) / size) ** 0.5


def test_nothing_is_dropped_in_eval_mode_and_at_rate_zero():
    assert AttentionDropout(0.0, PLACE, KeyedStream(seed=0))(SAMPLES, N) is None
    assert AttentionDropout(P, PLACE, KeyedStream(seed=0)).eval()(SAMPLES, N) is None
