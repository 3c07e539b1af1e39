"""Canonical names: what a tensor is called whatever wraps its module."""

from collections.abc import Callable

from torch import nn

WRAPPERS = {
    "_orig_mod": frozenset({"OptimizedModule"}),
    "_checkpoint_wrapped_module": frozenset({"CheckpointWrapper"}),
    "_fsdp_wrapped_module": frozenset({"FullyShardedDataParallel"}),
    "module": frozenset({"DistributedDataParallel", "DataParallel"}),
}
"""Path elements that torch's own wrappers insert, and the classes that do: compile, checkpointing, FSDP1, DDP."""

NameRule = Callable[[nn.Module, str], str]
"""``(part, path inside the part) -> canonical name``, with global layer numbers."""


def strip_wrappers(part: nn.Module, path: str) -> str:
    """The path without wrapper elements, whatever their nesting.

    A wrapper element is only one where the module really is that wrapper: a user's own submodule named ``module``
    keeps its name.
    """
    elements = path.split(".")
    if WRAPPERS.keys().isdisjoint(elements):
        return path  # nearly all paths, of which a switch asks hundreds inside the stall
    kept = []
    owner: nn.Module | None = part
    for element in elements:
        owner = _entered(owner, element)
        child = getattr(owner, element, None) if owner is not None else None
        if not (element in WRAPPERS and _is_a(owner, WRAPPERS[element])):
            kept.append(element)
        owner = child if isinstance(child, nn.Module) else None
    return ".".join(kept)


def _entered(owner: nn.Module | None, element: str) -> nn.Module | None:
    """``owner``, or what is inside it where it is a checkpoint wrapper: that leaves itself out of its own paths."""
    inside = "_checkpoint_wrapped_module"
    while owner is not None and element != inside and _is_a(owner, WRAPPERS[inside]):
        owner = owner.get_submodule(inside)
    return owner


def _is_a(owner: nn.Module | None, kinds: frozenset[str]) -> bool:
    """Whether ``owner`` is of one of these classes; FSDP2 puts a subclass of its own name in their place."""
    return any(kind.__name__ in kinds for kind in type(owner).__mro__)
