"""Whether each rank that holds something alone has a keeper for its snapshots, without the rule that chooses it."""

from collections.abc import Iterator, Sequence

import numpy as np

from dynatrain.judge.holdings import holdings
from dynatrain.judge.loss import _alone
from dynatrain.judge.verdict import shown
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import ITEMSIZE, Catalogue


def wrong_keepers(
    catalogue: Catalogue, owner: Ownership, nodes: Sequence[int], keeper: Sequence[int | None]
) -> tuple[str, ...]:
    """Whether each rank with boxes that exist once has one keeper, another rank, on another node where one is.

    Empty where all is right. It compares every rank's boxes with every other's.

    Args:
        catalogue: the tensors.
        owner: the ownership of the world, ranks 0 .. n - 1.
        nodes: the node of each rank.
        keeper: of each rank.
    """
    ranks = range(owner.layout.world_size)
    if not len(ranks) == len(nodes) == len(keeper):
        return (f"{len(ranks)} ranks have {len(nodes)} nodes and {len(keeper)} keepers; each has one",)
    return shown(list(_keeper_problems(nodes, keeper, _single_bytes(catalogue, owner))), "keeper(s) that are wrong")


def _keeper_problems(nodes: Sequence[int], keeper: Sequence[int | None], single: Sequence[int]) -> Iterator[str]:
    for rank, (found, size) in enumerate(zip(keeper, single, strict=True)):
        if found is None:
            if size and len(nodes) > 1:
                yield f"rank {rank} alone holds {size} bytes, and has no keeper"
        elif not 0 <= found < len(nodes) or found == rank:
            yield f"rank {rank} has keeper {found}; another one of 0 .. {len(nodes) - 1}"
        elif not size:
            yield f"rank {rank} has keeper {found}, and holds nothing alone"
        elif nodes[found] == nodes[rank] and len({*nodes}) > 1:
            yield f"rank {rank} and its keeper {found} are both on node {nodes[rank]}, and there are others"


def _single_bytes(catalogue: Catalogue, owner: Ownership) -> list[int]:
    """Bytes that each rank holds and nobody else does."""
    held = holdings(catalogue, owner, owner.layout.world_size)
    alone = np.stack([_alone(held, rank) for rank in range(owner.layout.world_size)], axis=1)
    volume = np.where(alone, held.volume(), 0)
    found = np.zeros(volume.shape[1], np.int64)
    for index, tensor in enumerate(catalogue):
        for at, state in enumerate(tensor.states):
            found += volume[held.kind[index, at]] * ITEMSIZE[state.dtype]
    return [int(size) for size in found]
