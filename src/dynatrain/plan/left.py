"""Who still has the pieces of an old world, at the step that a :class:`~dynatrain.plan.plan.Loss` names."""

from collections.abc import Iterator

from dynatrain.plan.plan import Loss


class Left:
    """The holders that may send, by the old ranks whose pieces they have.

    A box is had by those of its owners that have their own pieces of the step; where it has one owner alone, and that
    one has not, by its keeper. Of several keepers of one rank it is the one of the lowest number.

    Attributes:
        own: old ranks that have their own pieces of the step.
        live: whether all of these are the pieces that are trained with, so that they may be adopted.
    """

    def __init__(self, loss: Loss) -> None:
        there = [one for one in loss.kept if one.complete and one.step == loss.step and one.holder not in loss.lost]
        self.own = frozenset(one.owner for one in there if one.owner == one.holder)
        self.live = self.own <= {one.owner for one in there if one.live}
        self._keepers: dict[int, int] = {}
        for one in there:
            if one.owner not in self.own:
                self._keepers[one.owner] = min(one.holder, self._keepers.get(one.owner, one.holder))

    def holders(self, owners: tuple[int, ...]) -> tuple[int, ...]:
        """Who has a box that the old ranks ``owners`` owned; empty where nobody's memory does."""
        own = tuple(rank for rank in owners if rank in self.own)
        if own or len(owners) > 1:
            return own
        return tuple(self._keepers[rank] for rank in owners if rank in self._keepers)

    def wards(self, holder: int) -> Iterator[int]:
        """The old ranks that ``holder`` stands in for as their keeper."""
        return (owner for owner, keeper in self._keepers.items() if keeper == holder)
