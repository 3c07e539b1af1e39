"""Which rank keeps a copy of what nobody else holds, so that a loss without warning takes no box with it.

Every few steps each rank notes all its pieces in its own memory, and sends those boxes that exist once in the world to
its *keeper*, which is on another node where there is one. A box of which other ranks hold copies has no keeper: a copy
takes the lost one's place (copies that all lie on one node are lost with it, and only files have them then). The own
note is needed because whoever goes on from an earlier step needs all its pieces as they were then, not only those that
were lost.

A rank has one keeper for all its boxes. Dealt out box by box, the bytes would be evener still, but any two ranks that
are lost together would take something with them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dynatrain.plan.errors import PlanError
from dynatrain.plan.plan import Granule
from dynatrain.plan.sources import families
from dynatrain.space.box import Box, volume
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import ITEMSIZE, Catalogue


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepers:
    """Who keeps whose boxes, and the bytes of one snapshot; while the next one is written, a rank has two.

    Attributes:
        keeper: of each rank; None where it holds nothing alone, or is the only rank.
        own_bytes: that each rank notes of its own pieces, without padding.
        sent_bytes: that each rank sends to its keeper: its boxes that exist once.
    """

    keeper: tuple[int | None, ...]
    own_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]

    def wards(self, rank: int) -> tuple[int, ...]:
        """The ranks whose boxes ``rank`` keeps."""
        return tuple(owner for owner, keeper in enumerate(self.keeper) if keeper == rank)

    def kept_bytes(self, rank: int) -> int:
        """Bytes that ``rank`` keeps for others."""
        return sum(self.sent_bytes[ward] for ward in self.wards(rank))

    def bytes(self, rank: int) -> int:
        """Bytes of one snapshot in the memory of ``rank``: its own note and its wards' boxes."""
        return self.own_bytes[rank] + self.kept_bytes(rank)


def keepers(catalogue: Catalogue, owner: Ownership, nodes: Sequence[int]) -> Keepers:
    """The keepers of a world: a closed rule of its layout and nodes, equal on every rank.

    Ranks with most bytes choose first: of the ranks on other nodes (of all others, where there is one node) the one
    that keeps the fewest bytes so far, of equals the next one upwards in rank, around the end. So where nodes have
    equally many ranks of equal bytes, each keeps for one other; and no single change of a keeper lowers the most.

    Args:
        catalogue: the tensors.
        owner: the ownership of the world, ranks 0 .. n - 1.
        nodes: the node of each rank.

    Raises:
        PlanError: the nodes are not those of the ranks.
    """
    ranks = range(owner.layout.world_size)
    if len(nodes) != len(ranks):
        raise PlanError(f"nodes of {len(nodes)} ranks were given; the layout has {len(ranks)}, each with its node")
    own, sent = [0] * len(ranks), [0] * len(ranks)
    for _, box, holders, size in cells(catalogue, owner):
        for rank in holders:
            own[rank] += volume(box) * size
            sent[rank] += volume(box) * size if len(holders) == 1 else 0
    keeper: list[int | None] = [None] * len(ranks)
    load = [0] * len(ranks)
    for rank in sorted(ranks, key=lambda rank: (-sent[rank], rank)):
        others = [other for other in ranks if nodes[other] != nodes[rank]]
        others = others or [other for other in ranks if other != rank]
        if sent[rank] and others:
            found = min(others, key=lambda other: (load[other], (other - rank) % len(ranks)))
            keeper[rank] = found
            load[found] += sent[rank]
    return Keepers(keeper=tuple(keeper), own_bytes=tuple(own), sent_bytes=tuple(sent))


def kept_boxes(catalogue: Catalogue, owner: Ownership, rank: int) -> dict[Granule, Box]:
    """The boxes of ``rank`` that exist once in the world: what it sends to its keeper."""
    found = {}
    for index, tensor in enumerate(catalogue):
        for number, state in enumerate(tensor.states):
            box = owner.state_box(tensor, state, rank)
            if box is not None and volume(box) and owner.copies(tensor, state) == 1:
                found[index, number] = box
    return found


def cells(catalogue: Catalogue, owner: Ownership) -> Iterator[tuple[tuple[Granule, ...], Box, tuple[int, ...], int]]:
    """All boxes of an ownership: ``(granules, box, holders, bytes of an element of all granules)``.

    Granules that lie alike come together. The boxes of one granule are disjoint, not empty, and together the whole.
    """
    for family in families(catalogue, owner, owner):
        granules = tuple(granule for item in family.items for granule in item.granules)
        size = sum(ITEMSIZE[catalogue[tensor].states[state].dtype] for tensor, state in granules)
        for cell in family.old.cells():
            yield granules, family.old.box(cell), family.old.owners(cell), size
