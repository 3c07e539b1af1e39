"""Who leaves, who comes, and where, when a world is to have another size. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


class MembershipError(ValueError):
    """A change of members that cannot be; the text says what was seen, the rule, and what would do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NextWorld:
    """The members of a world to come.

    Attributes:
        new: members by rank.
        newcomers: the node of each member that is to come.
    """

    new: tuple[int, ...]
    newcomers: Mapping[int, int]


def next_world(
    world: Sequence[int],
    nodes: Mapping[int, int],
    *,
    size: int,
    leave: Collection[int],
    free: Mapping[int, int],
    first: int,
) -> NextWorld:
    """The world of ``size`` members that follows.

    Those named leave, then the highest ranks. Stayers keep their order; newcomers come behind those of their node, so
    that the ranks of one node are neighbours, on the node with the fewest members that has room.

    Args:
        world: members by rank.
        nodes: the node of each.
        size: how many there are to be.
        leave: members that are to leave.
        free: free places of each node.
        first: number of the first newcomer.

    Raises:
        MembershipError: nobody would stay, or there are too few places.
    """
    stayers = [member for member in world if member not in leave][:size]
    if not stayers:
        raise MembershipError(f"all {len(world)} ranks would leave; at least one stays and hands the state on")
    short = size - len(stayers) - sum(free.values())
    if short > 0:
        raise MembershipError(f"{size} ranks need {short} more places than are free; nearest: {size - short} ranks")
    there = {
        node: [member for member in stayers if nodes[member] == node]
        for node in (*dict.fromkeys(nodes[m] for m in stayers), *sorted(free))
    }
    newcomers: dict[int, int] = {}
    room = dict(free)
    for member in range(first, first + size - len(stayers)):
        node = min((node for node in room if room[node]), key=lambda node: (len(there[node]), node))
        room[node] -= 1
        there[node].append(member)
        newcomers[member] = node
    return NextWorld(new=tuple(member for members in there.values() for member in members), newcomers=newcomers)
