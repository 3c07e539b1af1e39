"""Activation checkpointing (Chen et al., arXiv 1604.06174): a block's forward is computed again in its backward.

What is kept of each transformer block: with ``full`` its input alone, with ``selective`` also the results of its matrix
products and of torch's fused attention, which cost the most to compute again; ring attention, whose parts are many
small products, and experts, which FSDP gathers inside the block, are computed again.

All ranks of a layout send a block's collectives a second time, in the same order: what is computed again follows from
the block alone. Dropout is keyed, so its masks come again; routers count in backward, once. A zero-bubble schedule
runs a block's backward in two halves, for its input and for its weights, and each half computes the block again.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from dynatrain.models.decoder import DecoderPart
from dynatrain.models.experts import Exchange, MixtureOfExperts
from dynatrain.train.torch_private import Lasting, without_modes

RECOMPUTE = ("none", "full", "selective")
"""What may be asked for."""

_OPS = torch.ops.aten
_KEPT = {
    _OPS.mm.default,
    _OPS.addmm.default,
    _OPS._grouped_mm.default,  # noqa: SLF001 - operators are named so
    _OPS._scaled_dot_product_flash_attention.default,  # noqa: SLF001
    _OPS._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
    _OPS._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
    _OPS._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
}


def recompute_blocks(part: DecoderPart, what: str, *, halves: bool = False) -> None:
    """Wrap every block of ``part`` in torch's checkpoint; before ``fully_shard``, which gathers it once for both.

    Args:
        part: its blocks are replaced; their parameters keep their canonical names.
        what: one of :data:`RECOMPUTE`.
        halves: backward comes in two halves, so what is kept has to last for both.
    """
    if what == "none":
        return
    # No stream of torch is drawn from inside a block, so there is none to put back.
    options: dict[str, Any] = {"preserve_rng_state": False}
    if what == "selective":
        options["context_fn"] = _lasting_contexts if halves else _contexts
    for number, block in list(part.layers.items()):
        if what == "selective" and isinstance(block.mlp, MixtureOfExperts):
            block.mlp.exchange = _Unwatched(block.mlp.exchange)
        part.layers[number] = checkpoint_wrapper(block, **options)


def _policy(_context: Any, op: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


_contexts = partial(create_selective_checkpoint_contexts, _policy)


def _lasting_contexts() -> tuple[Any, Any]:
    forward, again = _contexts()
    return forward, Lasting(again)


class _Unwatched(Exchange):
    """An exchange whose operators torch's selective checkpoint does not see.

    It holds the second forward's operators against the first's, and FSDP gathers experts in another order then.
    """

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.sequences)
        self._exchange = exchange

    def run(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """As of the exchange."""
        with without_modes():
            return self._exchange.run(experts, rows, counts)
