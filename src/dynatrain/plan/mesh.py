"""The ranks of a layout by number, both ways: what a plan looks up for every holder."""

from collections.abc import Sequence

import numpy as np

from dynatrain.layout.layout import AXES, Layout
from dynatrain.plan.table import Ints


class Mesh:
    """The ranks of a layout, and the digits of their numbers; see :mod:`dynatrain.layout.layout`.

    Attributes:
        layout: itself.
        stage_size: ranks of one pipeline stage.
        ranks: the rank of each number.
        numbers: the number of each rank up to the largest; -1 for those between that the layout does not name.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.stage_size = layout.digit("pp")[0]
        self.ranks: Sequence[int] = range(layout.world_size)
        self.numbers: Sequence[int] = self.ranks
        named = [axis for axis, _ in layout.axes]
        usual = sorted(named, key=AXES.index)
        if named != usual or layout.order:
            ranks = _ranks(layout, [named.index(axis) for axis in usual])
            numbers = np.full(ranks.max() + 1, -1)
            numbers[ranks] = np.arange(len(ranks))
            self.ranks, self.numbers = ranks.tolist(), numbers.tolist()


def _ranks(layout: Layout, usual: list[int]) -> Ints:
    """The rank of each number; ``usual`` are the axes of the layout, by place, in their usual order."""
    walk = np.arange(layout.world_size).reshape([size for _, size in layout.axes])
    ranks = np.array(layout.order or range(layout.world_size), np.int64)
    return np.asarray(ranks[walk.transpose(usual).ravel()], np.int64)
