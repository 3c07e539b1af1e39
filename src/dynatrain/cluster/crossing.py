"""Who is who when a run goes on with other members.

A *member* is a process of the run, by a number that is never used again; a *world* is a numbered generation with an
ordered list of members, in which a member's place is its rank. A *crossing* is a switch whose target has other members:
*stayers* are in both worlds, *leavers* in the old one alone, *newcomers* in the new one alone.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """One numbering of everybody in a crossing, in which its plan, judge, digests, moves and votes count.

    Its numbers are called *holders*: the old ranks in their order, then the newcomers in the order of their new ranks.

    Attributes:
        generation: of the new world; never used before, not by a crossing that was given up either.
        old: members of the old world, by rank.
        new: members of the new world, by rank.
    """

    generation: int
    old: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def holders(self) -> tuple[int, ...]:
        """Members by holder."""
        return (*self.old, *(member for member in self.new if member not in self.old))

    @property
    def newcomers(self) -> range:
        """The newcomers' holders."""
        return range(len(self.old), len(self.holders))

    @property
    def over(self) -> tuple[int, ...]:
        """The holder of each new rank."""
        return tuple(map(self.holders.index, self.new))

    def rank(self, member: int) -> int:
        """The new rank of a member; -1 of a leaver."""
        return self.new.index(member) if member in self.new else -1
