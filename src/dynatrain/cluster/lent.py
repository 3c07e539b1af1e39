"""Places of a run that another program has for a while. Values and rules, pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from dynatrain.cluster.membership import MembershipError

Spot = tuple[int, int]
"""``(node, slot)``: a place for one rank, and the device that belongs to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loan:
    """What is lent, until all of it is reclaimed.

    Attributes:
        spots: the places, in order; the run takes none of them meanwhile.
        before: layout when the first of them was lent.
        after: layout since the last was.
    """

    spots: tuple[Spot, ...] = ()
    before: str = ""
    after: str = ""

    def lend(self, spots: Iterable[Spot], before: str, after: str) -> Self:
        """With more lent, in a crossing from the layout ``before`` to ``after``."""
        return replace(
            self, spots=tuple(sorted({*self.spots, *spots})), before=self.before if self.spots else before, after=after
        )

    def layout_back(self, present: str) -> str:
        """The layout to go back to; empty where the run has been given another one since, which then counts."""
        return self.before if present == self.after else ""

    def without(self, free: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        """Free places by node, without those that are lent."""
        return {node: [slot for slot in slots if (node, slot) not in self.spots] for node, slots in free.items()}

    def alone(self, taken: Iterable[Spot]) -> dict[int, list[int]]:
        """The lent places by node that no process of the run has any more."""
        found: dict[int, list[int]] = {}
        for node, slot in self.spots:
            if (node, slot) not in taken:
                found.setdefault(node, []).append(slot)
        return found

    def words(self, device: str) -> str:
        """For people."""
        return spots_text(self.spots, device)


def spots_text(spots: Iterable[Spot], device: str) -> str:
    """Places for people: by node and device, or by node and slot where ranks have no device of their own."""
    name = "cuda:{}" if device == "cuda" else "slot {}"
    return ", ".join(f"node {node} {name.format(slot)}" for node, slot in spots)


def require_fewer(size: int, to: int, leave: int) -> None:
    """Refuse to lend ranks that are not there to be lent.

    Args:
        size: ranks of the world.
        to: that are to be left.
        leave: how many were named.

    Raises:
        MembershipError: lending would start ranks.
    """
    if to > size - leave:
        raise MembershipError(
            f"{to} ranks would be left of {size} of which {leave} are lent; nearest: {size - leave}. To have more: "
            "scale, or reclaim"
        )
