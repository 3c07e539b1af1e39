"""Gradient reduction in one fixed binary tree, so that dp, fsdp and their mixes give equal bits.

Micro-batch i of a step runs on data rank i mod n (n a power of two: data rank = dp * fsdp_size + fsdp). The lowest
levels of the tree over micro-batches are then the data ranks: neighbours along fsdp first, then along dp; the higher
levels are the micro-batches of one rank, added as a binary counter. Which levels run on the wire and which run in one
process depends on the layout; the tree, and hence every bit, does not.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


def tree_sum(parts: torch.Tensor) -> torch.Tensor:
    """Sum over dim 0 of ``parts`` [n, k] in a binary tree of neighbours; an odd last one joins a level later."""
    while len(parts) > 1:
        even = len(parts) // 2 * 2
        paired = parts[0:even:2] + parts[1:even:2]
        parts = paired if even == len(parts) else torch.cat([paired, parts[even:]])
    return parts[0]


class TreeReduceScatter:
    """FSDP2's reduce-scatter as one all-to-all and a local tree sum. Public hook: ``set_custom_reduce_scatter``."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An ordinary tensor: this reduction needs no special memory."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Write this rank's reduced chunk of ``input_tensor`` [n * k] into ``output_tensor`` [k]."""
        if op != dist.ReduceOp.SUM or async_op:
            raise AssertionError(f"the tree reduction sums, synchronously; asked for {op}, async={async_op}")
        if not input_tensor.numel():  # of tp ranks without rows; the whole group's
            return
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(tree_sum(received.view(group.size(), -1)))


def tree_all_reduce(group: dist.ProcessGroup) -> Callable[[torch.Tensor], None]:
    """A hook for ``set_all_reduce_hook``: sums a flat tensor over ``group`` in place, in the same tree."""
    n = group.size()

    def hook(flat: torch.Tensor) -> None:
        if not flat.numel():
            return
        size = -(-flat.numel() // n)
        padded = flat.new_zeros(n * size)
        padded[: flat.numel()] = flat
        received = torch.empty_like(padded)
        dist.all_to_all_single(received, padded, group=group)
        dist.all_gather_single(padded, tree_sum(received.view(n, size)), group=group)
        flat.copy_(padded[: flat.numel()])

    return hook


class MicroBatchCounter:
    """Adds the gradients of successive micro-batches as a binary counter adds ones.

    Holds at most log2(micro-batches) + 1 gradients at a time. Use: :meth:`push` after each backward, :meth:`finish`
    before the norm; in between ``.grad`` is None. What a part of the step has accumulated in another layout is pushed
    first: it finds its place in the tree by the number of its micro-batches.
    """

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self._params = params
        self._stack: list[tuple[int, list[torch.Tensor | None]]] = []

    def push(self, count: int) -> None:
        """Take each parameter's gradient away and add it in: a sum of ``count`` micro-batches, over all data ranks."""
        grads = [param.grad for param in self._params]
        for param in self._params:
            param.grad = None
        while self._stack and self._stack[-1][0] == count:
            grads = _add(self._stack.pop()[1], grads)
            count *= 2
        self._stack.append((count, grads))

    def finish(self) -> None:
        """Give the sum back as each parameter's gradient."""
        _, total = self._stack.pop()
        while self._stack:
            total = _add(self._stack.pop()[1], total)
        for param, grad in zip(self._params, total, strict=True):
            param.grad = grad


def _add(earlier: list[torch.Tensor | None], later: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(earlier, later, strict=True)]
