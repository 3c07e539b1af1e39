"""The exchange of rows between ranks that hold different experts, or different parts of the same experts' width.

The ranks of one ``ep`` group hold different experts, those of one ``etp`` group different parts of F of the same ones,
and every rank has tokens of its own. A row goes to the ep rank that holds its expert (an all-to-all with uneven parts);
there the ranks of the etp group give one another all their rows, each computes its part of F, and the parts are added
up where the row came in; then the output goes home. The sum over etp is taken in the order of the group, so that every
run has the same bits. All of it is one autograd function, whose backward is the same exchange the other way round.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dynatrain.models.experts import Exchange


class ExpertGroups(Exchange):
    """Brings rows to experts over process groups.

    Every rank of both groups takes part in each forward and backward, also without a row.

    Args:
        ep: rank i of it holds experts i E/ep up to (i + 1) E/ep of the E experts, which ep divides.
        etp: as above; None where each rank holds the whole width.
        sequences: as of :class:`Exchange`.
    """

    def __init__(
        self,
        ep: dist.ProcessGroup,
        etp: dist.ProcessGroup | None = None,
        sequences: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        super().__init__(sequences)
        self.ep = ep
        self.etp = etp

    def run(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """As of :class:`Exchange`; ``experts`` are this rank's: its E/ep experts, its part of their width."""
        mine = counts.view(self.ep.size(), -1)  # [ep, E/ep]
        here = _all_to_all(mine, [1] * len(mine), [1] * len(mine), self.ep)  # of each rank, for the experts here
        sent, came = mine.sum(1).tolist(), here.sum(1).tolist()
        there = _Moved.apply(rows, sent, came, self.ep)
        outputs = self._at_experts(experts, there, here)
        return _Moved.apply(outputs, came, sent, self.ep)

    def _at_experts(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """Outputs [R, H] for rows that came to this rank, in blocks of ``counts`` [ep, E/ep]."""
        if self.etp is None:
            return _by_expert(experts, rows, counts)
        ways = self.etp.size()
        alike = [len(counts)] * ways
        all_counts = _all_to_all(counts.repeat(ways, 1), alike, alike, self.etp)
        each = all_counts.view(ways, -1).sum(1).tolist()
        gathered = _Moved.apply(rows.repeat(ways, 1), [len(rows)] * ways, each, self.etp)
        parts = _Moved.apply(_by_expert(experts, gathered, all_counts), each, [len(rows)] * ways, self.etp)
        return parts.unflatten(0, (ways, -1)).sum(0)


def _by_expert(experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
    """The experts on rows that come in blocks: int64 [sources, experts], sorted by source, then by expert."""
    numbers = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
    order = numbers.repeat_interleave(counts.flatten()).argsort(stable=True)
    return experts(rows[order], counts.sum(0))[order.argsort()]


class _Moved(torch.autograd.Function):
    """Rows in blocks for each rank of a group -> rows in blocks from each; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], came: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way = came, sent, group
        return _all_to_all(rows, sent, came, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, *ctx.way), None, None, None


def _all_to_all(values: Tensor, sent: list[int], came: list[int], group: dist.ProcessGroup) -> Tensor:
    received = values.new_empty(sum(came), *values.shape[1:])
    dist.all_to_all_single(received, values.contiguous(), came, sent, group=group)
    return received
