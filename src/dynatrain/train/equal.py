"""Values that must be equal on all ranks, compared by hashes."""

import hashlib
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from dynatrain.train.agreement import SwitchAbortedError


def require_equal(told: Sequence[Mapping[str, str]], *, everywhere: bool = True) -> None:
    """Compare what all ranks tell: a hash of each thing, by what it is.

    Args:
        told: by rank.
        everywhere: all ranks must tell of it; otherwise those that do must agree.

    Raises:
        SwitchAbortedError: something is not equal, by name; on every rank alike.
    """
    problems = []
    for what in sorted({what for facts in told for what in facts}):
        tellers = [rank for rank, facts in enumerate(told) if everywhere or what in facts]
        first = tellers[0]
        others = [rank for rank in tellers if told[rank].get(what) != told[first].get(what)]
        if others:
            problems.append(f"{what} is not equal on all ranks: ranks {others} differ from rank {first}")
    if problems:
        raise SwitchAbortedError("; ".join(problems))


def hash_of(value: Any, leave_out: Container[int] = ()) -> str:
    """A hash of numbers, texts, tensors and containers of them, without the values of these identities."""
    digest = hashlib.sha256()

    def feed(node: Any) -> None:
        if isinstance(node, Mapping):
            for key in sorted(node, key=str):
                if id(node[key]) not in leave_out:
                    digest.update(f"{key}:".encode())
                    feed(node[key])
        elif isinstance(node, list | tuple):
            digest.update(f"{len(node)}[".encode())
            for item in node:
                feed(item)
        elif isinstance(node, torch.Tensor):
            whole = node.detach().cpu().contiguous()
            digest.update(f"{whole.dtype}{tuple(whole.shape)}".encode() + whole.view(-1).view(torch.uint8).numpy().data)
        elif isinstance(node, bool | int | float | str | bytes | None):
            digest.update(repr(node).encode())
        else:  # no bits to compare
            digest.update(type(node).__name__.encode())

    feed(value)
    return digest.hexdigest()
