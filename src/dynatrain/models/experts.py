"""A mixture of experts in place of the MLP: each token's experts, the way to them, the experts, the sum.

The block is the same in every layout: tokens are routed where they are; one replaceable :class:`Exchange` brings a row
for each (token, expert) to whoever holds the expert, and its output back; a token's outputs are added up in the order
of the experts' global numbers. So no sum depends on where an expert is.

Legend of shapes: B samples, T tokens, H hidden size, E experts, K experts of a token, R rows.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from dynatrain.models.keyed import KeyedStream
from dynatrain.models.routing import Beside, Router, balance_loss, counted
from dynatrain.space.blocks import Experts
from dynatrain.space.decoder import DecoderShape


class Exchange:
    """How rows come to the experts that they are for; in this one every process holds all experts.

    Args:
        sequences: groups over which the tokens of a sequence are spread (of tp, of cp); their product shares it.
    """

    def __init__(self, sequences: Sequence[dist.ProcessGroup] = ()) -> None:
        self.sequences = tuple(sequences)

    def run(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """The experts' outputs for ``rows``.

        Args:
            experts: those of this process: (rows, sorted by expert; int64, rows of each) -> outputs.
            rows: [R, H], sorted by the expert's global number.
            counts: int64 [E], how many rows are for each.

        Returns:
            [R, H], in the order of ``rows``.
        """
        return experts(rows, counts)

    def whole(self, counts: Tensor) -> Tensor:
        """Counts of whole sequences, from those of the tokens that this process holds of them; both int64 [B, E]."""
        counts = counts.clone()
        for group in self.sequences:
            dist.all_reduce(counts, group=group)
        return counts


class GroupedExperts(nn.Module):
    """SwiGLU of each of the experts that this process holds: all of them, or a part of them, or of their widths."""

    def __init__(self, hidden_size: int, sizes: Experts) -> None:
        super().__init__()
        wide, narrow = (
            (sizes.num_experts, *dims)
            for dims in ((sizes.moe_intermediate_size, hidden_size), (hidden_size, sizes.moe_intermediate_size))
        )
        self.gate_proj = nn.Parameter(torch.empty(wide))
        self.up_proj = nn.Parameter(torch.empty(wide))
        self.down_proj = nn.Parameter(torch.empty(narrow))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """[R, H], sorted by expert, and int64 rows of each -> [R, H]."""
        multiply = _grouped if _can_group(rows, self.gate_proj) else _one_by_one
        gate = multiply(rows, _local(self.gate_proj), counts)
        up = multiply(rows, _local(self.up_proj), counts)
        return multiply(functional.silu(gate) * up, _local(self.down_proj), counts)


class MixtureOfExperts(nn.Module):
    """The block.

    Args:
        shape: with ``experts``.
        shared: the MLP that every token passes as well; None where there is none.
        streams: of the part; says how much one token's loss counts.
    """

    def __init__(self, shape: DecoderShape, shared: nn.Module | None, streams: KeyedStream) -> None:
        super().__init__()
        assert shape.experts is not None
        self.sizes = shape.experts
        self.streams = streams
        self.exchange = Exchange()
        self.gate = Router(shape.hidden_size, shape.experts)
        self.experts = GroupedExperts(shape.hidden_size, shape.experts)
        self.shared_experts = shared

    def forward(self, x: Tensor, samples: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]; ``samples`` [B] are global numbers, below 0 for what fills a batch up."""
        scores, chosen, weights = self.gate(x)
        weights = self._balanced(weights, scores, chosen, samples)
        sent = chosen.flatten()  # row r is token r // K's
        order = sent.argsort(stable=True)
        rows = x.flatten(0, 1)[order // self.sizes.num_experts_per_tok]
        counts = counted(sent[None], self.sizes.num_experts)[0]
        outputs = self.exchange.run(self.experts, rows, counts)
        outputs = outputs[order.argsort()].view(*chosen.shape, -1)
        mixed = (outputs * weights[..., None]).sum(-2).to(x.dtype)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(x)

    def _balanced(self, weights: Tensor, scores: Tensor, chosen: Tensor, samples: Tensor) -> Tensor:
        """The weights; in backward, what balances the load is done beside."""
        real = samples >= 0
        counts = counted(chosen.flatten(1), self.sizes.num_experts) * real[:, None]
        loss = None
        if self.sizes.router_aux_loss_coef:
            factor = self.sizes.router_aux_loss_coef * self.streams.token_weight
            loss = factor * balance_loss(scores * real[:, None, None], self.exchange.whole(counts))
        counters = self.gate.tokens_per_expert if self.streams.counting else None
        return Beside.apply(weights, loss, counters, counts.sum(0))


def _local(weight: Tensor) -> Tensor:
    """What this process holds of it: whoever cuts experts cuts the rows alike, and no rule of torch has to know."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _can_group(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies all experts at once: not in fp64, not without a row, and rows are of whole 16 bytes."""
    whole = all(size * rows.itemsize % 16 == 0 for size in _local(weight).shape[1:])
    return rows.dtype != torch.float64 and len(rows) > 0 and whole


def _grouped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """[R, in] by [E, out, in] -> [R, out], as one call."""
    ends = counts.cumsum(0).to(torch.int32)
    return functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def _one_by_one(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """As :func:`_grouped`, expert by expert."""
    parts = rows.split(counts.tolist())
    return torch.cat([functional.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])
