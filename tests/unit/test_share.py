"""Which tokens a rank holds, and how attention of one process sees documents."""

import pytest
import torch
from torch.nn import functional

from dynatrain.models.attend import attend_whole, visible
from dynatrain.models.ring import _blocks
from dynatrain.models.share import TokenShare, positions


def test_a_rank_holds_one_early_and_one_late_chunk():
    assert TokenShare(parts=2, part=0).attended(8).tolist() == [0, 1, 6, 7]
    assert TokenShare(parts=2, part=1).attended(8).tolist() == [2, 3, 4, 5]
    assert TokenShare(parts=2, part=1).attended(8, part=0).tolist() == [0, 1, 6, 7]
    assert TokenShare().attended(5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_every_token_has_one_rank_and_every_rank_the_same_causal_work(parts):
    shares = [TokenShare(parts=parts, part=part).attended(48) for part in range(parts)]

    assert sorted(torch.cat(shares).tolist()) == list(range(48))
    assert len({int((tokens + 1).sum()) for tokens in shares}) == 1


@pytest.mark.parametrize(("parts", "slices"), [(1, 3), (2, 1), (2, 4), (3, 2)])
def test_slices_of_a_part_are_its_tokens_in_order(parts, slices):
    for part in range(parts):
        held = [
            TokenShare(parts=parts, part=part, slices=slices, slice=i).resident(24 // slices) for i in range(slices)
        ]

        assert torch.equal(torch.cat(held), TokenShare(parts=parts, part=part).attended(24 * parts))


def test_a_batch_is_cut_along_its_tokens():
    x = torch.arange(24).view(2, 12)

    assert TokenShare().of(x) is x
    assert TokenShare(parts=3, part=2).of(x).tolist() == [[4, 5, 6, 7], [16, 17, 18, 19]]


@pytest.mark.parametrize(("tokens", "near"), [(10, "8 or 12"), (3, "4"), (15, "12 or 16"), (0, "4")])
def test_a_sequence_that_cannot_be_cut_is_refused_with_the_nearest_that_can(tokens, near):
    with pytest.raises(ValueError, match=rf"{tokens} tokens; 2 context parallel ranks .* into 4 .*nearest: {near}$"):
        TokenShare(parts=2).attended(tokens)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_every_rank_of_a_ring_works_on_the_same_number_of_blocks_and_skips_what_no_query_sees(parts):
    for part in range(parts):
        share = TokenShare(parts=parts, part=part)
        rows = torch.empty(1, 1, 1, 8, 1)
        found = [block for of in range(parts) for block in _blocks(share, of, None, None, rows)]

        assert len(found) == 2 * parts + 1
        assert sum(seen is not None for _, _, seen, _ in found) == 2  # on the diagonal


STARTS = torch.tensor([[0, 0, 0, 3, 4, 4], [0, 0, 0, 0, 0, 0]])


def test_positions_begin_anew_with_a_document():
    assert positions(torch.arange(6), STARTS).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert positions(torch.tensor([1, 5]), STARTS).tolist() == [[1, 1], [1, 5]]
    assert positions(torch.tensor([1, 5]), None).tolist() == [1, 5]


def test_a_query_sees_its_document_up_to_itself():
    seen = visible(torch.tensor([2, 5]), torch.arange(6), STARTS)

    assert seen.shape == (2, 1, 2, 6)
    assert seen[0, 0].int().tolist() == [[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1]]
    assert seen[1, 0].int().tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]]
    assert torch.equal(visible(torch.tensor([2, 5]), torch.arange(6), None), seen[1, 0])


def test_packed_documents_are_mixed_as_each_alone():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 6, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    alone = [attend_whole(*(x[:, part] for x in (q, k, v)), None) for part in map(slice, (0, 3, 4), (3, 4, 6))]

    torch.testing.assert_close(attend_whole(q, k, v, STARTS[:1]), torch.cat(alone, dim=1), rtol=0, atol=1e-15)
    assert (attend_whole(q, k, v, None)[:, 3:] - torch.cat(alone[1:], dim=1)).abs().max() > 1e-3


def test_torch_never_drops_attention_of_its_own(monkeypatch):
    """Its masks would depend on how heads and tokens are cut over ranks."""
    taken = []

    def watched(*args, **more):
        taken.append((len(args), more.get("dropout_p", 0.0)))
        return functional_attention(*args, **more)

    functional_attention = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    q = torch.randn(2, 6, 2, 4)
    for documents in (None, STARTS):
        attend_whole(q, q, q, documents)

    assert taken == [(3, 0.0)] * 2
