"""Megatron's pair of cuts (Shoeybi et al., arXiv 1909.08053): by columns what reads the input, by rows what writes.

All that reads shares one input. It is gathered once. Of its gradient each rank's columns give a share of a sum: shares
are added up over the matrices first and over the ranks once, so messages do not grow with the number of matrices.
"""

from collections.abc import Iterable

from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel


def column_row(at: str, between: Placement, *, columns: Iterable[str], row: str) -> dict[str, ParallelStyle]:
    """How tp treats a module: one message in and one out, and one each for their gradients.

    Its input stays a DTensor inside: a plain tensor could not say that its gradient is a share of a sum.

    Args:
        at: path of the module, which takes one positional tensor, [B, T, H].
        between: how the residual stream lies on the tp ranks outside.
        columns: names of the linear layers in it that read.
        row: of the one that writes.
    """
    return {
        at: PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
        **{f"{at}.{name}": ColwiseParallel() for name in columns},
        f"{at}.{row}": RowwiseParallel(output_layouts=between),
    }
