"""Keyed dropout: the mask depends on logical place alone, and looks random."""

import pytest
import torch
from tests import oracle

from dynatrain.models.keyed import KeyedDropout, KeyedStream, keep_mask
from dynatrain.models.share import TokenShare


def mask(*, p=0.25, seed=1, step=0, place="layers.0.mlp", samples=range(8), tokens=range(64), features=range(128)):
    return keep_mask(
        KeyedStream(seed=seed, step=step),
        place,
        p,
        samples=torch.tensor(list(samples), dtype=torch.int64),
        tokens=torch.tensor(list(tokens), dtype=torch.int64),
        features=torch.tensor(list(features), dtype=torch.int64),
    )


def test_any_box_has_the_bits_of_the_whole_mask():
    whole = mask()

    assert torch.equal(mask(samples=[5, 2], tokens=range(7, 31), features=range(3, 90)), whole[[5, 2], 7:31, 3:90])
    assert mask(samples=[]).shape == (0, 64, 128)
    assert mask(tokens=[]).shape == (8, 0, 128)


def test_the_mask_does_not_depend_on_how_many_rows_are_hashed_at_once(monkeypatch):
    whole = mask()
    monkeypatch.setattr("dynatrain.models.keyed._CPU_BLOCK", 300)

    assert torch.equal(mask(), whole)


def test_every_share_of_the_tokens_drops_what_the_whole_stream_drops():
    stream = KeyedStream(seed=3)
    dropout = KeyedDropout(0.4, "layers.1.self_attn", stream)
    x = torch.randn(4, 32, 16, dtype=torch.float64)
    samples = torch.tensor([9, 4, 2**32 - 1, 0])

    whole = dropout(x, samples)
    stream.share = TokenShare(slices=2, slice=1)
    assert torch.equal(dropout(x[:, 16:], samples), whole[:, 16:])
    assert torch.equal(dropout(x[2:, 16:], samples[2:]), whole[2:, 16:])
    stream.share = TokenShare(parts=2, part=1, slices=4, slice=2)  # of tokens 8 to 23
    assert torch.equal(dropout(x[:, 16:20], samples), whole[:, 16:20])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout_is_the_stated_formula(dtype):
    stream = KeyedStream(seed=11, step=5)
    x = torch.randn(3, 40, 24).to(dtype)
    samples = torch.tensor([2**31 + 7, 1, 123_456_789])

    assert torch.equal(
        KeyedDropout(0.3, "embed_tokens", stream)(x, samples), oracle.dropout(x, 0.3, "11/5", "embed_tokens", samples)
    )


def test_eval_mode_and_zero_rate_are_the_identity():
    x, samples = torch.randn(2, 4, 8), torch.arange(2)

    assert KeyedDropout(0.0, "a", KeyedStream(seed=0))(x, samples) is x
    assert KeyedDropout(0.5, "a", KeyedStream(seed=0)).eval()(x, samples) is x


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_an_impossible_rate_is_refused(p):
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        KeyedDropout(p, "a", KeyedStream(seed=0))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_kept_share_is_within_five_standard_errors(p):
    kept = mask(p=p, samples=range(16)).double()

    assert abs(kept.mean().item() - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
    for dims in ((0, 1), (1, 2), (0, 2)):  # no feature, sample or token is favoured either
        shares = kept.mean(dim=dims)
        error = (p * (1 - p) * shares.numel() / kept.numel()) ** 0.5
        assert (shares - (1 - p)).abs().max().item() < 5.5 * error


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("lag", [1, 2, 16])
def test_neighbours_are_not_correlated(dim, lag):
    kept = mask(samples=range(32)).double() - 0.75
    length = kept.shape[dim] - lag
    products = kept.narrow(dim, 0, length) * kept.narrow(dim, lag, length)

    assert abs(products.mean().item()) < 5 * 0.25 * 0.75 / products.numel() ** 0.5


@pytest.mark.parametrize(
    "other",
    [{"step": 1}, {"seed": 2}, {"place": "layers.1.mlp"}, {"place": "layers.0.self_attn"}, {"samples": range(8, 16)}],
)
def test_masks_of_other_keys_are_not_correlated(other):
    products = (mask().double() - 0.75) * (mask(**other).double() - 0.75)

    assert abs(products.mean().item()) < 5 * 0.25 * 0.75 / products.numel() ** 0.5
