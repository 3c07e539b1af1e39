"""A parameter as an optimizer sees it: this rank's piece, its box, and the groups over which the tensor is cut."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dynatrain.space.box import Box, chunk, shape_of, whole, within
from dynatrain.train.live import cuts_of
from dynatrain.train.torch_private import local_tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """One axis that cuts a tensor.

    Attributes:
        dim: of the tensor.
        start: first index of what is cut along it.
        stop: one past its last.
        group: the ranks among which that is cut, each a ceil-sized chunk by its rank in the group.
    """

    dim: int
    start: int
    stop: int
    group: dist.ProcessGroup

    def chunk(self, index: int) -> tuple[int, int]:
        """The part of one rank of the group."""
        return chunk(self.start, self.stop, self.group.size(), index)


class Shard:
    """This rank's piece of a parameter, plain or a DTensor.

    All ranks that hold pieces of one copy call the methods that communicate alike, in the same order; ranks with an
    empty piece, too.

    Args:
        param: the parameter; not changed.

    Attributes:
        shape: of the whole tensor.
        box: this rank's, possibly empty.
        cuts: in cutting order.
    """

    def __init__(self, param: torch.Tensor) -> None:
        self.shape = tuple(param.shape)
        box, cuts = list(whole(self.shape)), []
        for axis, dim in cuts_of(param):
            assert isinstance(param, DTensor)
            cut = Cut(dim, *box[dim], param.device_mesh.get_group(axis))
            box[dim] = cut.chunk(cut.group.rank())
            cuts.append(cut)
        self.box: Box = tuple(box)
        self.cuts = tuple(cuts)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's piece of ``tensor``, which lies like the parameter; shares its memory."""
        return local_tensor(tensor).view(shape_of(self.box))

    def sum(self, local: torch.Tensor, dims: Collection[int]) -> torch.Tensor:
        """Add ``local`` up, in place, over the axes that cut any of ``dims``: an all-reduce each."""
        return self._reduce(local, dims, dist.ReduceOp.SUM)

    def max(self, local: torch.Tensor, dims: Collection[int]) -> torch.Tensor:
        """As :meth:`sum`, the largest."""
        return self._reduce(local, dims, dist.ReduceOp.MAX)

    def mean_square(self, local: torch.Tensor) -> torch.Tensor:
        """The mean square of a whole tensor of which this rank has ``local``; one element."""
        return self.sum(local.square().sum(), range(len(self.shape))) / max(1, torch.Size(self.shape).numel())

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor of which this rank has ``local``: an all-gather per cut, the last cut first.

        Pieces of unequal size travel padded to the largest.
        """
        for cut in reversed(self.cuts):
            sizes = [stop - start for start, stop in map(cut.chunk, range(cut.group.size()))]
            room = list(local.shape)
            room[cut.dim] = max(sizes)
            padded = local.new_zeros(room)
            padded.narrow(cut.dim, 0, local.shape[cut.dim]).copy_(local)
            parts = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(parts, padded, group=cut.group)
            local = torch.cat([part.narrow(cut.dim, 0, n) for part, n in zip(parts, sizes, strict=True)], cut.dim)
        return local

    def cut_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a whole ``tensor``; a view."""
        return tensor[within(self.box, whole(self.shape))]

    def _reduce(self, local: torch.Tensor, dims: Collection[int], op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        for cut in self.cuts:
            if cut.dim in dims:
                dist.all_reduce(local, op, group=cut.group)
        return local
