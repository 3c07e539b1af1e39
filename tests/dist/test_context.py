"""Attention over ranks that share a sequence equals attention of one process, forward and backward."""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from tests.dist.foreign import everywhere
from tests.ledgers import Messages

from dynatrain.models import attend, blocks, context, ring
from dynatrain.models.context import WAYS, attend_over
from dynatrain.models.share import TokenShare

B, T, N, D, E = 2, 48, 12, 6, 5
KEY_HEADS = (12, 4, 2, 1)
LENGTHS = ((3, 20, 1, 16, 8), (48,))
"""Tokens of the documents of either sample: some shorter than a chunk, some over several."""


ROWS = [torch.tensor(row) for row in LENGTHS]
STARTS = torch.stack([(row.cumsum(0) - row).repeat_interleave(row) for row in ROWS])
NUMBERS = torch.stack([torch.arange(len(row)).repeat_interleave(row) for row in ROWS])
"""Of every token's document: its first token, and which one it is [B, T]."""


def operands(heads, dtype=torch.float64):
    """q, k, v and the gradient of the result, of whole sequences."""
    generator = torch.Generator().manual_seed(heads)
    sizes = ((B, T, N, D), (B, T, heads, D), (B, T, heads, E), (B, T, N, E))
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def plain(q, k, v, d_out, *, packed):
    """Attention by its formula on one process: the result, and the gradients of q, k and v."""
    q, k, v, d_out = (x.double() for x in (q, k, v, d_out))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    wide_k, wide_v = (x.repeat_interleave(N // x.shape[2], dim=2) for x in (k, v))
    numbers = NUMBERS * packed
    seen = (numbers[:, :, None] == numbers[:, None]) & torch.ones(T, T).tril().bool()
    scores = torch.einsum("bqnd,bknd->bnqk", q, wide_k) / math.sqrt(D)
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("bnqk,bkne->bqne", weights, wide_v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]


def shared(way, share, group, heads, *, packed, dtype=torch.float64, cut=slice(None)):
    """This rank's tokens of the result and of the gradients, by ``way``; ``cut`` takes a share of all heads."""
    q, k, v, d_out = (share.of(x[:, :, cut] if x.shape[2] == N else x).clone() for x in operands(heads, dtype))
    if cut != slice(None):
        k, v = (x[:, :, cut.start * heads // N : cut.stop * heads // N].clone() for x in (k, v))
    for x in (q, k, v):
        x.requires_grad_()
    out = attend_over(way, share, group)(q, k, v, STARTS if packed else None)
    out.backward(d_out)
    return [out.detach(), q.grad, k.grad, v.grad]


def apart(found, expected):
    """The largest difference."""
    pairs = list(zip(found, expected, strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    worst = max((a - b).abs().max().item() for a, b in pairs)
    return math.inf if math.isnan(worst) else worst


def groups(ranks):
    """A share and a group of each number of parts that this rank takes part in, of four ranks."""
    pairs, three = [dist.new_group([0, 1]), dist.new_group([2, 3])], dist.new_group([0, 1, 2])
    found = {2: pairs[ranks.rank // 2], 4: dist.group.WORLD} | ({3: three} if ranks.rank < 3 else {})
    return {parts: (TokenShare(parts=parts, part=group.rank()), group) for parts, group in found.items()}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_equals_one_process(way):
    expected = {(heads, packed): plain(*operands(heads), packed=packed)
                for heads in KEY_HEADS for packed in (False, True)}  # fmt: skip

    def work(world):
        return {
            (parts, heads, packed): apart(
                shared(way, share, group, heads, packed=packed), [share.of(x) for x in expected[heads, packed]]
            )
            for parts, (share, group) in groups(world).items()
            for heads, packed in expected
        }

    for found in everywhere(4, work):
        assert max(found.values()) < 1e-12, found


def test_every_way_equals_one_process_where_tensor_parallelism_cuts_the_heads():
    expected = plain(*operands(4), packed=True)

    def work(world):
        tp, part = divmod(world.rank, 2)
        share, group = groups(world)[2]
        cut, keys = slice(tp * N // 2, (tp + 1) * N // 2), slice(tp * 2, (tp + 1) * 2)
        out, d_q, d_k, d_v = (share.of(x) for x in expected)
        mine = [out[:, :, cut], d_q[:, :, cut], d_k[:, :, keys], d_v[:, :, keys]]
        assert part == share.part
        return {way: apart(shared(way, share, group, 4, packed=True, cut=cut), mine) for way in WAYS}

    for found in everywhere(4, work):
        assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_is_rounded_once_however_many_blocks_are_merged(dtype):
    """Half a unit of the last place of the result, and what fp32 sums lose."""
    out, _, _, d_v = plain(*operands(4, dtype), packed=True)
    unit = torch.finfo(dtype).eps

    def work(world):
        share, group = groups(world)[4]
        mixed, _, _, mine = shared("ring", share, group, 4, packed=True, dtype=dtype)
        assert mixed.dtype == mine.dtype == dtype
        return [
            ((x.double() - share.of(y)).abs() / (share.of(y).abs() * unit / 2 + 1e-5)).max().item()
            for x, y in ((mixed, out), (mine, d_v))
        ]

    assert max(map(max, everywhere(4, work))) <= 1.01


def test_a_ring_takes_so_many_queries_at_once_that_scores_stay_small(monkeypatch):
    monkeypatch.setattr(ring, "ROWS", 5)
    expected, chunk = plain(*operands(4), packed=True), 64

    def work(world):
        share, group = groups(world)[2]
        with Messages() as seen:
            long = torch.randn(1, 2 * chunk, 2, 4, requires_grad=True)
            attend_over("ring", share, group)(long, long, long, None).sum().backward()
        assert seen.largest < chunk * chunk * long.itemsize
        return apart(shared("ring", share, group, 4, packed=True), [share.of(x) for x in expected])

    assert max(everywhere(4, work)) < 1e-12


def test_kinds_and_sizes_of_communication_and_what_a_rank_holds():
    """The ring is point to point alone, and no tensor of it is as large as the keys of all tokens."""
    size, local = 64, T // 4

    def work(world):
        share, group = groups(world)[4]
        found = {}
        for way, heads in (("gather", 2), ("ring", 2), ("ulysses", 4)):
            q, k, v = (torch.randn(1, local, heads, size, requires_grad=True) for _ in range(3))
            with Messages() as seen:
                attend_over(way, share, group)(q, k, v, None).sum().backward()
            kinds = {kind: count for (_, kind), count in seen.calls.items()}
            found[way] = (kinds, seen.sent.total() // q.itemsize, seen.largest // q.itemsize)
        return found

    both = local * 2 * 2 * size  # keys and values of a rank
    passed = 3 + 3 + 4  # forward; once more, and their gradients, which come home
    for found in everywhere(4, work):
        assert found["ring"][:2] == ({"send": passed, "recv_": passed}, passed * both)
        assert found["ring"][2] < T * 2 * size <= found["gather"][2]
        assert found["gather"][:2] == ({"_allgather_base_": 1, "alltoall_base_": 1}, both + 4 * both)
        assert found["ulysses"][:2] == ({"alltoall_base_": 4}, 2 * (3 + 1) * local * 4 * size)


@contextmanager
def planted(fault):
    """A fault in the code, by name."""
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](patch)
        yield


def _rescale_forgotten(patch):
    def merge(out, lse, block_out, block_lse):
        both = torch.logaddexp(lse, block_lse)
        out.add_(block_out * torch.exp(block_lse - blocks._finite(both))[..., None])
        lse.copy_(both)

    patch.setattr(ring, "merge_into", merge)


def _mask_off_by_one(patch):
    def visible(queries, keys, documents):
        return seen(queries, keys - 1, documents)

    seen = attend.visible
    for module in (attend, context, ring):
        patch.setattr(module, "visible", visible)


def _documents_ignored(patch):
    for module in (attend, context, ring):
        patch.setattr(module, "visible", lambda queries, keys, _: keys <= queries[:, None])
    blocks_of = ring._blocks
    patch.setattr(ring, "_blocks", lambda share, part, _, *rest: blocks_of(share, part, None, *rest))


def _copies_without_gradient(patch):
    whole = torch.Tensor.repeat_interleave

    def repeat(x, copies, dim):
        x = x.unsqueeze(dim + 1)
        return torch.cat((x, whole(x.detach(), copies - 1, dim=dim + 1)), dim + 1).flatten(dim, dim + 1)

    patch.setattr(torch.Tensor, "repeat_interleave", repeat)


FAULTS = {
    "rescale forgotten": _rescale_forgotten,
    "mask off by one": _mask_off_by_one,
    "documents ignored": _documents_ignored,
    "copies of keys without gradient": _copies_without_gradient,
}
SHOWS_IN = {
    "rescale forgotten": ("ring",),
    "mask off by one": tuple(WAYS),
    "documents ignored": ("gather", "ring"),
    "copies of keys without gradient": ("ulysses",),
}


def test_planted_faults_show():
    expected = plain(*operands(1), packed=True)

    def work(world):
        share, group = groups(world)[4]
        found = {}
        for fault, ways in SHOWS_IN.items():
            with planted(fault):
                for way in ways:
                    found[fault, way] = apart(
                        shared(way, share, group, 1, packed=True), [share.of(x) for x in expected]
                    )
        return found

    for places in zip(*(found.items() for found in everywhere(4, work)), strict=True):
        (what, _), *_ = places
        assert max(worst for _, worst in places) > 1e-3, what


def test_more_ranks_than_ulysses_has_heads_for_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match="8 ranks of ulysses attention do not divide 12 query heads; nearest: 4 or 6"):
        WAYS["ulysses"](TokenShare(parts=8), None)(*operands(4)[:3], None)
