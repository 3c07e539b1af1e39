"""Canonical names: what a tensor is called whatever wraps its module."""

from collections.abc import Callable

from torch import nn

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"})
"""Path elements that torch's own wrappers insert: compile, activation checkpointing, FSDP1, DDP."""

NameRule = Callable[[nn.Module, str], str]
"""``(part, path inside the part) -> canonical name``, with global layer numbers."""


def strip_wrappers(part: nn.Module, path: str) -> str:
    """The path without wrapper elements, whatever their nesting.

    A wrapper element is only one where the module really is that wrapper: a user's own submodule named ``module``
    keeps its name.
    """
    kept = []
    owner: nn.Module | None = part
    for element in path.split("."):
        child = getattr(owner, element, None) if owner is not None else None
        if not (element in WRAPPERS and _wraps(owner, element)):
            kept.append(element)
        owner = child if isinstance(child, nn.Module) else None
    return ".".join(kept)


def _wraps(owner: nn.Module | None, element: str) -> bool:
    kind = type(owner).__name__
    return {
        "_orig_mod": kind == "OptimizedModule",
        "_checkpoint_wrapped_module": kind == "CheckpointWrapper",
        "_fsdp_wrapped_module": kind == "FullyShardedDataParallel",
        "module": kind in {"DistributedDataParallel", "DataParallel"},
    }[element]
