"""Which storage is padded.

``fully_shard`` keeps a parameter's shard in storage for the largest shard of its fsdp group - the ceil-sized chunk -
also on ranks that got fewer rows or none. Optimizer states are not padded.
"""

from collections.abc import Callable

from dynatrain.space.tensor import State, Tensor

GATHERED = ("fsdp", "efsdp")
"""Axes along which ``fully_shard`` gathers: of the parameters, and of the experts."""

Padded = Callable[[Tensor, State], bool]
"""Whether a state's storage is padded to the ceil-sized fsdp chunk."""


def fsdp_pads(_tensor: Tensor, state: State) -> bool:
    """The rule of ``fully_shard``: parameters are padded, what the optimizer keeps is not."""
    return state.name == "param"
