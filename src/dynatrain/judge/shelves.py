"""The judge of plans with files at one end: every element once, and from where it is.

It counts elements and asks each rank's box of the ownership; it shares no code with the plan's derivation.
"""

from collections.abc import Iterable, Iterator, Sequence

from dynatrain.judge.verdict import place, shown
from dynatrain.plan.plan import Boxes, Fetch, Granule
from dynatrain.space.box import Box, intersect, volume, whole
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue


def judge_shelf(catalogue: Catalogue, boxes: Boxes) -> tuple[str, ...]:
    """Whether a shelf's boxes are each granule, whole and once; empty where they are."""
    problems = []
    for index, tensor in enumerate(catalogue):
        for number, state in enumerate(tensor.states):
            all_of_it = whole(tensor.state_shape(state))
            if wrong := _covers(all_of_it, boxes.get((index, number), ())):
                problems.append(f"{tensor.name} {state.name}: {wrong}")
    return shown(problems, "state(s) of which the files have not every element once")


def judge_reads(
    catalogue: Catalogue, boxes: Boxes, new: Ownership, rank: int, fetches: Sequence[Fetch]
) -> tuple[str, ...]:
    """Whether what ``rank`` reads fills all its pieces once, from boxes that have it; empty where it does."""
    problems = list(_outside(catalogue, boxes, fetches))
    by_granule = _by_granule(fetches)
    for granule, box in _held(catalogue, new, rank):
        if wrong := _covers(box, [fetch.box for fetch in by_granule.pop(granule, [])]):
            problems.append(f"{place(catalogue[granule[0]], granule[1], box, rank)}: {wrong}")
    problems += [f"rank {rank} reads {granule}, of which it owns nothing" for granule in by_granule]
    return shown(problems, "piece(s) not read exactly once")


def _outside(catalogue: Catalogue, boxes: Boxes, fetches: Iterable[Fetch]) -> Iterator[str]:
    for fetch in fetches:
        stored = boxes.get(fetch.granule, ())
        if fetch.place >= len(stored) or intersect(stored[fetch.place], fetch.box) != fetch.box:
            yield f"{fetch.box} of {catalogue[fetch.granule[0]].name} is not in box {fetch.place} of the files"


def _by_granule(fetches: Iterable[Fetch]) -> dict[Granule, list[Fetch]]:
    found: dict[Granule, list[Fetch]] = {}
    for fetch in fetches:
        found.setdefault(fetch.granule, []).append(fetch)
    return found


def _held(catalogue: Catalogue, owner: Ownership, rank: int) -> Iterator[tuple[Granule, Box]]:
    """The pieces of ``rank`` that have elements."""
    for index, tensor in enumerate(catalogue):
        box = owner.box(tensor, rank)
        for number, state in enumerate(tensor.states):
            if box is not None and volume(piece := state.box(box, tensor.shape)):
                yield (index, number), piece


def _covers(box: Box, parts: Sequence[Box]) -> str:
    """Why ``parts`` are not ``box`` exactly once; empty where they are. Parts outside of it count as wrong."""
    outside = [part for part in parts if volume(part) and intersect(box, part) != part]
    if outside:
        return f"{outside[0]} is not in {box}"
    held = sorted(part for part in parts if volume(part))
    brought = sum(map(volume, held))
    twice = _overlap(held)
    if twice is not None:
        return f"{twice} comes twice"
    return "" if brought == volume(box) else f"{volume(box) - brought} of {volume(box)} elements missing"


def _overlap(parts: Sequence[Box]) -> Box | None:
    """A box that two of ``parts`` share; they are sorted, so only those that begin before one ends can meet it."""
    for at, part in enumerate(parts):
        for other in parts[at + 1 :]:
            if part and other[0][0] >= part[0][1]:
                break
            common = intersect(part, other)
            if common is not None:
                return common
    return None
