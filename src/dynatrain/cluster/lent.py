"""Places of a run that another program has for a while."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Self

from dynatrain.cluster.membership import MembershipError
from dynatrain.observe.requests import Request

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


class Loans:
    """The loan of a run, as the agent that leads it keeps it.

    Args:
        device: ``cpu`` or ``cuda``, for words.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._loan = Loan()
        self._before = ""

    @property
    def spots(self) -> tuple[Spot, ...]:
        """The places that are lent."""
        return self._loan.spots

    def asked(
        self, request: Request, sizes: tuple[int, int], named: str, present: str, nodes: Collection[int]
    ) -> tuple[int, str]:
        """Size and named layout of the world that a request for other members is about.

        Args:
            request: to scale, lend or reclaim.
            sizes: of the present world, and of the one that the request's arguments say.
            named: layout, as text; empty for none.
            present: layout, as text.
            nodes: that the run has; what was lent of others went with them.

        Raises:
            MembershipError: lending would start ranks.
        """
        size, to = sizes
        if request.verb == "reclaim":
            return size + sum(node in nodes for node, _ in self.spots), named or self._loan.layout_back(present)
        left = size - len(set(request.arguments.get("leave", [])))
        if request.verb == "lend" and to > left:
            raise MembershipError(
                f"{to} ranks would be left of {size} of which {size - left} are lent; nearest: {left}. To have more: "
                "scale, or reclaim"
            )
        return to, named

    def begin(self, layout: str) -> None:
        """A crossing begins in this layout: rank 0 may say the next one before the crossing is known to be over."""
        self._before = layout

    def settle(self, verb: str, spots: Iterable[Spot], layout: str) -> bool:
        """The crossing that began is done; whether what is lent has changed.

        Args:
            verb: that it was asked for by.
            spots: of those who left.
            layout: that it led to.
        """
        if verb == "lend":
            self._loan = self._loan.lend(spots, self._before, layout)
        elif verb == "reclaim":
            self._loan = Loan()
        return verb in {"lend", "reclaim"}

    def alone(self, taken: Iterable[Spot], nodes: Collection[int]) -> dict[int, list[int]]:
        """The lent places by node, of these nodes, that no process of the run has any more."""
        gone = {*taken}
        free: dict[int, list[int]] = {}
        for node, slot in self.spots:
            if (node, slot) not in gone and node in nodes:
                free.setdefault(node, []).append(slot)
        return free

    def words(self, spots: Iterable[Spot]) -> str:
        """Places for people: by node and device, or by node and slot where ranks have no device of their own."""
        name = "cuda:{}" if self._device == "cuda" else "slot {}"
        return ", ".join(f"node {node} {name.format(slot)}" for node, slot in spots)
