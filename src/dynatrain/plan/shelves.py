"""Plans with files at one end: what a rank reads from a shelf, and what it writes into one.

A shelf owns boxes of granules, in any cut: its files may come from another layout, another number of ranks, another
program. So, as between ranks, the pieces of one side are cut by the boxes of the other: every rank takes what its new
piece needs. Writing, the pieces of one copy of each granule become its boxes, and the copies take turns by the bytes
that they have written already, so that replicas share the work.
"""

from dynatrain.plan.plan import Boxes, Fetch, Granule, Loss
from dynatrain.plan.sources import families
from dynatrain.space.box import Box, intersect, volume
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue


def reads(catalogue: Catalogue, boxes: Boxes, new: Ownership, rank: int) -> tuple[Fetch, ...]:
    """What ``rank`` reads so that all its pieces under ``new`` are filled."""
    found = []
    for granule, piece in _pieces(catalogue, new, rank).items():
        if not volume(piece):
            continue
        for place, box in enumerate(boxes[granule]):
            common = intersect(piece, box)
            if common is not None:
                found.append(Fetch(granule, common, place))
    return tuple(found)


def reads_of_rest(
    catalogue: Catalogue, boxes: Boxes, old: Ownership, new: Ownership, rank: int, loss: Loss
) -> tuple[Fetch, ...]:
    """What ``rank`` reads after a loss: of its pieces under ``new`` what nobody has in memory, of the same step."""
    found = [
        Fetch(granule, common, place)
        for family in families(catalogue, old, new, loss=loss)
        for cut in family.incoming(rank)
        if not cut.sources
        for item in family.items
        for granule in item.granules
        for place, box in enumerate(boxes[granule])
        if (common := intersect(cut.box, box)) is not None
    ]
    return tuple(sorted(found, key=lambda fetch: (fetch.granule, fetch.place, fetch.box)))


def written_pieces(catalogue: Catalogue, owner: Ownership, rank: int, *, dealt: bool = True) -> dict[Granule, Box]:
    """The pieces that ``rank`` writes where all pieces of one copy of each granule are written.

    Args:
        catalogue: all tensors.
        owner: who holds what.
        rank: who writes.
        dealt: replicas share the work; else the first copy of everything is written.
    """
    held = _pieces(catalogue, owner, rank)
    turns = writers(catalogue, owner) if dealt else dict.fromkeys(held, 0)
    found = {}
    for granule, box in held.items():
        tensor = catalogue[granule[0]]
        if volume(box) and owner.copy_index(tensor, rank, tensor.states[granule[1]]) == turns[granule]:
            found[granule] = box
    return found


def writers(catalogue: Catalogue, owner: Ownership) -> dict[Granule, int]:
    """Which copy of each granule is written: the one whose ranks have least to write so far; equal on all ranks.

    Of scalars and vectors it is the first: dealt out, their few bytes would have every rank open every file to read.
    """
    loads: dict[tuple[tuple[int, ...], int, int], int] = {}
    found = {}
    for index, tensor in enumerate(catalogue):
        stages = owner.placements[tensor.name].stages
        for number, state in enumerate(tensor.states):
            copies = owner.copies(tensor, state)
            options = range(1 if len(tensor.state_shape(state)) < 2 else copies)
            turn = min(options, key=lambda copy: (loads.get((stages, copies, copy), 0), copy))
            key = stages, copies, turn
            loads[key] = loads.get(key, 0) + tensor.nbytes(state) * copies
            found[index, number] = turn
    return found


def _pieces(catalogue: Catalogue, owner: Ownership, rank: int) -> dict[Granule, Box]:
    found: dict[Granule, Box] = {}
    for index, tensor in enumerate(catalogue):
        box = owner.box(tensor, rank)
        if box is not None:
            found |= {(index, at): state.box(box, tensor.shape) for at, state in enumerate(tensor.states)}
    return found
