"""From one world's members to the next one's: who this rank is on the way, and whose process groups it has.

A switch among the same members has one :class:`~dynatrain.train.party.Party`, the standing one. A crossing has three:
the old world's, which trains; that of all holders, in whose numbers the switch itself counts (its votes and moves, on a
board and with groups of its own); and the new world's, whose groups and modules are made beside training in a thread
that is shown its default group (:func:`~dynatrain.train.torch_private.own_default`). At the step edge the default group
is swapped, and back where the crossing is aborted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from dynatrain.cluster.board import Board
from dynatrain.cluster.crossing import Crossing
from dynatrain.cluster.summons import Summons
from dynatrain.layout.layout import Layout
from dynatrain.space.ownership import Ownership
from dynatrain.train.groups import DEFAULT, GroupPool
from dynatrain.train.order import Order
from dynatrain.train.party import Party
from dynatrain.train.torch_private import own_default, swap_default
from dynatrain.train.world import World


@dataclass(slots=True, kw_only=True)
class Passage:
    """One rank's way through one switch.

    Attributes:
        standing: this rank in the world that trains: of a newcomer, in the one to come.
        party: in whose numbers the switch counts.
        after: this rank in the new world; None of a leaver.
        crossing: who is who; None where all stay.
        groups: what the switch makes for its own questions and moves.
        made: what it makes for the new world.
        lost: numbers, behind all others, of ranks of the old world that are lost.
    """

    standing: Party
    party: Party
    after: Party | None
    crossing: Crossing | None
    groups: GroupPool
    made: GroupPool
    lost: frozenset[int] = frozenset()
    _default: dist.ProcessGroup | None = None
    _before: dist.ProcessGroup | None = None

    @property
    def leaves(self) -> bool:
        """Whether this rank is a leaver."""
        return self.after is None

    @property
    def comes(self) -> bool:
        """Whether this rank is a newcomer."""
        return self.crossing is not None and self.party.rank in self.crossing.newcomers

    @property
    def keeps_books(self) -> bool:
        """Whether this rank derives the whole plan, for the records: it is rank 0 before, or after."""
        return self.party.rank == 0 or (self.after is not None and self.after.rank == 0)

    def speaks(self, old: Ownership) -> bool:
        """Whether this rank is the one of its stage in the old world that tells what the stage's modules hold."""
        layout, number = old.layout, old.layout.number(self.party.rank)
        if number is None:
            return False
        first = number - number % layout.digit("pp")[0]
        return all(layout.rank_of(before) in self.lost for before in range(first, number))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside it this thread is a rank of the new world."""
        if self.crossing is None or self.after is None:
            yield
            return
        self._default = self.made.get(DEFAULT, self.after.everyone)
        with own_default(self._default):
            yield

    def settle(self) -> None:
        """A newcomer's: it has no other default group."""
        assert self.after is not None
        swap_default(self.made.get(DEFAULT, self.after.everyone))

    @property
    def gate(self) -> Board:
        """Where the ranks of the world that trains agree on the step edge."""
        if self.crossing is None:
            return self.standing.board
        assert self.standing.worlds is not None
        return self.standing.worlds.crossing(self.crossing.generation, len(self.crossing.old))

    def give_up(self, why: str) -> str:
        """End a crossing that has not begun, at once and not at the next edge; the reason that stands."""
        assert self.crossing is not None
        return self.gate.give_up(self.crossing.generation, why).reason

    def say_warm(self) -> None:
        """A newcomer's word that it can begin."""
        self.party.board.post(f"warm/{self.party.rank}", "")

    def cold(self) -> str:
        """The newcomers that have not said so, in words; empty where there are none."""
        crossing, board = self.crossing, self.party.board
        late = [n for n in crossing.newcomers if board.peek(f"warm/{n}") is None] if crossing else []
        return f"newcomers {[self.party.members[n] for n in late]} were" if late else ""

    def enter(self) -> None:
        """This process is a rank of the new world from here on, provisionally."""
        if self._default is not None:
            self._before = swap_default(self._default)

    def go_back(self) -> None:
        """It is a rank of the old one again."""
        if self._before is not None:
            swap_default(self._before)
            self._before = None

    def over(self, layout: Layout) -> Layout:
        """The new world's layout in the numbers of this switch."""
        return layout if self.crossing is None else layout.over(self.crossing.over)

    def of_new(self, told: list[Any]) -> list[Any]:
        """Of what all have told, the new world's, by rank."""
        return told if self.crossing is None else [told[holder] for holder in self.crossing.over]

    def of_old(self, told: list[Any]) -> list[Any]:
        """Of what all have told, the old world's, by rank."""
        return told if self.crossing is None else told[: len(self.crossing.old)]

    def commit(self, new: World) -> None:
        """The new world stands; of the old one's groups nothing is left in a rank that stays.

        Args:
            new: the new world; its ownership counts by rank from here on.
        """
        self.made.keep()
        if self.crossing is None:
            return
        self.groups.close()
        assert new.ownership is not None
        new.ownership = Ownership(new.layout, new.ownership.placements)
        if self._before is not None and self.after is not None:
            self.standing.groups.take(self._before)
            self.standing.groups.close()
            self.standing.enter(self.after)

    def close(self) -> None:
        """Given up: what was made for the switch and for the new world is destroyed."""
        self.groups.close()
        self.made.close()


def passage(party: Party, order: Order) -> Passage:
    """The way of ``party``, a rank of the world that trains, through the switch of ``order``."""
    if not order.members:
        groups = party.groups.draft(order.number, party.deadline)
        return Passage(standing=party, party=party, after=party, crossing=None, groups=groups, made=groups)
    crossing = Crossing(generation=order.generation, old=party.members, new=order.members)
    holder = of_holders(party, crossing)
    after = of_new_world(party, crossing) if crossing.rank(party.member) >= 0 else None
    return _crossing(party, holder, after, crossing, order)


def remainder(party: Party, loss: Summons, order: Order) -> Passage:
    """The way of ``party``, a survivor of ``loss``.

    Holders are the survivors in their old order, then newcomers; behind them the lost ranks have numbers, by which a
    plan says that nothing comes from them.
    """
    crossing = Crossing(generation=loss.generation, old=loss.survivors, new=loss.new)
    after = of_new_world(party, crossing) if crossing.rank(party.member) >= 0 else None
    way = _crossing(party, of_holders(party, crossing), after, crossing, order)
    way.lost = frozenset(range(loss.holders, loss.holders + len(loss.lost)))
    return way


def numbers(loss: Summons) -> tuple[int, ...]:
    """The number of each rank of the old world in the crossing after a loss: see :func:`remainder`."""
    survivors, lost = iter(range(len(loss.survivors))), iter(range(loss.holders, loss.holders + len(loss.lost)))
    return tuple(next(lost) if member in loss.lost else next(survivors) for member in loss.old)


def arrival(after: Party, crossing: Crossing, order: Order) -> Passage:
    """The way of a newcomer, whose party in the new world is ``after``."""
    return _crossing(after, of_holders(after, crossing), after, crossing, order)


def _crossing(standing: Party, party: Party, after: Party | None, crossing: Crossing, order: Order) -> Passage:
    groups = party.groups.draft(order.number, party.deadline)
    made = after.groups.draft(order.number, party.deadline) if after else groups
    return Passage(standing=standing, party=party, after=after, crossing=crossing, groups=groups, made=made)


def of_holders(party: Party, crossing: Crossing) -> Party:
    """``party`` as one of all holders."""
    assert party.worlds is not None
    number, size = crossing.holders.index(party.member), len(crossing.holders)
    return replace(
        party,
        rank=number,
        world_size=size,
        members=crossing.holders,
        board=party.worlds.crossing(crossing.generation, size),
        groups=_pool(party, f"x{crossing.generation}", number),
    )


def of_new_world(party: Party, crossing: Crossing) -> Party:
    """``party`` as a rank of the new world."""
    assert party.worlds is not None
    number, size = crossing.rank(party.member), len(crossing.new)
    return replace(
        party,
        rank=number,
        world_size=size,
        members=crossing.new,
        generation=crossing.generation,
        board=party.worlds.world(crossing.generation, size),
        groups=_pool(party, f"g{crossing.generation}", number),
    )


def _pool(party: Party, world: str, rank: int) -> GroupPool:
    return GroupPool(
        party.groups.connections,
        rank=rank,
        world=world,
        backend=party.groups.backend,
        timeout_seconds=party.groups.timeout_seconds,
    )
