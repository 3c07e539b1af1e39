"""An embedding whose rows are cut over the tp ranks (Shoeybi et al., arXiv 1909.08053), some of which may have none.

Each rank looks up the tokens that it has rows for, and gives zeros for all others; the sum over the ranks is the
embedding. torch's own lookup of a cut weight does likewise, but fails on a rank without rows: 5 rows over 4 ranks are
2, 2, 1 and 0.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from dynatrain.space.box import chunk


class VocabularyParallel(ParallelStyle):
    """For an ``nn.Embedding``: token ids [B, T], equal on all ranks -> [B, T, H].

    Args:
        out: how the result lies on the tp ranks: ``Replicate()``, or ``Shard(1)`` for a slice of the sequence.
    """

    def __init__(self, out: Placement) -> None:
        super().__init__()
        self._out = out

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rows = distribute_tensor(module.weight.detach(), device_mesh, [Shard(0)])
        module.weight = nn.Parameter(rows)
        module.forward = partial(_look_up, module, device_mesh, self._out)
        return module


def _look_up(module: nn.Module, mesh: DeviceMesh, out: Placement, tokens: torch.Tensor) -> torch.Tensor:
    weight = module.weight
    rows = weight.to_local()
    start, stop = chunk(0, weight.shape[0], mesh.size(), mesh.get_local_rank())
    elsewhere = (tokens < start) | (tokens >= stop)
    if start < stop:
        found = functional.embedding((tokens - start).masked_fill(elsewhere, 0), rows)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
    else:
        found = rows.new_zeros(*tokens.shape, weight.shape[1]) + rows.sum()  # so that the rows have a gradient, too
    summed = DTensor.from_local(found, mesh, [Partial()], run_check=False)
    return summed.redistribute(placements=[out]).to_local()
