"""Which rank order of a new layout leaves most bytes where they are. Pure, and equal on every rank.

A rank's place among the axes is a number of many digits: each axis gives one for each prime factor of its size. An
order of the digits is a rank order. Tried are all orders of whole axes, then, from the best of them, exchanges of two
digits and digits taken elsewhere, as long as one gains. What counts is the bytes of the old pieces that lie in the new
pieces of the same rank; among equals the order as written stays, then the first one found. An order is out of the
question where a group of ranks along tp, cp, ep or etp would lie on more nodes than it does as written.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from dynatrain.layout.layout import AXES, EXPERT_AXES, Layout
from dynatrain.plan.storage import PieceTable
from dynatrain.plan.table import Ints
from dynatrain.space.ownership import Ownership, Placement
from dynatrain.space.tensor import ITEMSIZE, Catalogue

_CLOSE = ("tp", "cp", *EXPERT_AXES)
"""Axes whose ranks talk in every layer: how many nodes their groups lie on is left alone."""

_Digit = tuple[str, int, int]
"""``(axis, ways, stride in the axis)``."""


def chosen_order(catalogue: Catalogue, old: Ownership, new: Ownership, ranks_per_node: int | None = None) -> Layout:
    """The layout of ``new`` in the rank order that moves fewest bytes; as it is where its order is pinned.

    Pinned is an order that the text spells, and axes that stand in another than the usual order.

    Args:
        catalogue: the tensors.
        old: the ownership that has the state.
        new: the ownership that needs it, as declared.
        ranks_per_node: rank ``r`` is on node ``r // ranks_per_node``; None puts all ranks on one node.
    """
    layout = new.layout
    if layout.order or [name for name, _ in layout.axes] != [axis for axis in AXES if layout.size(axis) > 1]:
        return layout
    staying, node = _Staying(catalogue, old, new), ranks_per_node or layout.world_size
    allowed = _nodes(layout, np.arange(layout.world_size), node)

    def worth(digits: Sequence[_Digit]) -> int:
        numbers = _numbers(layout, digits)
        spread = _nodes(layout, numbers, node)
        return staying.bytes(numbers) if all(map(int.__le__, spread, allowed)) else -1

    axes = layout.axes
    digits = _digits(axes)
    most = worth(digits)
    for tried in itertools.permutations(layout.axes):
        if (found := worth(_digits(tried))) > most:
            axes, digits, most = tried, _digits(tried), found
    whole, gained = digits, True
    while gained:
        gained = False
        for change in _changes(len(digits)):
            changed = [digits[at] for at in change]
            if (found := worth(changed)) > most:
                digits, most, gained = changed, found, True
    if digits == whole:
        return replace(layout, axes=axes)
    return replace(layout, order=tuple(np.argsort(_numbers(layout, digits)).tolist()))


def _changes(count: int) -> Iterator[list[int]]:
    """Each pair of ``count`` digits exchanged; each digit taken to each other place."""
    for one, other in itertools.combinations(range(count), 2):
        swapped = [*range(count)]
        swapped[one], swapped[other] = other, one
        yield swapped
    for one, other in itertools.permutations(range(count), 2):
        if abs(one - other) > 1:
            left = [at for at in range(count) if at != one]
            yield [*left[:other], one, *left[other:]]


class _Staying:
    """Bytes that stay on their ranks, as a function of the number of each rank in the new layout."""

    def __init__(self, catalogue: Catalogue, old: Ownership, new: Ownership) -> None:
        self._ranks = min(old.layout.world_size, new.layout.world_size)
        weights: dict[tuple[tuple[int, ...], Placement, Placement], int] = {}
        for tensor in catalogue:
            for state in tensor.states:
                key = tensor.state_shape(state), old.placed(tensor, state), new.placed(tensor, state)
                weights[key] = weights.get(key, 0) + ITEMSIZE[state.dtype]
        before, after = PieceTable(old, old.layout.world_size), PieceTable(new, new.layout.world_size)
        self._parts = [
            (weight, before.pieces(shape, one), after.pieces(shape, other))
            for (shape, one, other), weight in weights.items()
        ]

    def bytes(self, numbers: Ints) -> int:
        """Of all ranks; ``numbers`` is the number of each in the new layout, whose usual order the pieces are in."""
        here, total = numbers[: self._ranks], 0
        for weight, old, new in self._parts:
            both = np.flatnonzero(old.held[: self._ranks] & new.held[here])
            at = here[both]
            low, high = np.maximum(old.low[both], new.low[at]), np.minimum(old.high[both], new.high[at])
            total += weight * int((high - low).clip(min=0).prod(axis=1).sum())
        return total


def _digits(axes: Sequence[tuple[str, int]]) -> list[_Digit]:
    """Each axis by its prime factors, both outermost first."""
    found = []
    for name, size in axes:
        stride = size
        for prime in _primes(size):
            stride //= prime
            found.append((name, prime, stride))
    return found


def _numbers(layout: Layout, digits: Sequence[_Digit]) -> Ints:
    """The number of each rank where ``digits``, outermost first, are the digits of ranks."""
    ranks = np.arange(layout.world_size)
    index = {name: np.zeros_like(ranks) for name, _ in layout.axes}
    stride = layout.world_size
    for name, size, weight in digits:
        stride //= size
        index[name] += ranks // stride % size * weight
    number = np.zeros_like(ranks)
    for name, size in layout.axes:
        number = number * size + index[name]
    return number


def _nodes(layout: Layout, numbers: Ints, ranks_per_node: int) -> list[int]:
    """Over how many nodes the groups along each axis of :data:`_CLOSE` lie, at most."""
    ranks = np.argsort(numbers)  # of each number
    found = []
    for axis in _CLOSE:
        stride, ways = layout.digit(axis)
        node = ranks.reshape(-1, ways, stride) // ranks_per_node
        node = np.sort(node, axis=1)
        found.append(int((np.diff(node, axis=1) > 0).sum(axis=1).max(initial=0)) + 1)
    return found


def _primes(size: int) -> Iterator[int]:
    """Prime factors, ascending."""
    factor = 2
    while size > 1:
        while size % factor == 0:
            yield factor
            size //= factor
        factor += 1
