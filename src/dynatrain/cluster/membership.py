"""Who leaves, who comes, and where, when a world is to have other members. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


class MembershipError(ValueError):
    """A change of members that cannot be; the text says what was seen, the rule, and what would do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NextWorld:
    """The members of a world to come.

    Attributes:
        new: members by new rank.
        leavers: old members that are not among them, by old rank.
        newcomers: the node of each member that is to come, by number.
    """

    new: tuple[int, ...]
    leavers: tuple[int, ...]
    newcomers: Mapping[int, int]


def next_world(
    world: Sequence[int],
    nodes: Mapping[int, int],
    *,
    size: int,
    leave: Collection[int],
    free: Mapping[int, int],
    first: int,
    ready: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> NextWorld:
    """The world of ``size`` members that follows.

    Those that are named leave, then the highest ranks. Stayers keep their order, so that rank 0 stays rank 0 unless it
    leaves, and each newcomer comes behind the members of its node, so that the ranks of one node remain neighbours.
    Spares are taken first; then, and among nodes that have some, a newcomer goes where the fewest members are, of equal
    nodes to the first. Nodes need not have equally many.

    Args:
        world: members by rank; those of one node are neighbours.
        nodes: the node of each.
        size: how many there are to be.
        leave: members that are to leave.
        free: free places of each node, which a leaver's place is not yet.
        first: number of the first newcomer that is no spare; the next one has the next number.
        ready: spares of each node, by number; their places count as free.

    Raises:
        MembershipError: nobody would be left, somebody is no member, nobody would stay, or places are too few; all that
            is wrong at once.
    """
    stayers = [member for member in world if member not in leave][: max(size, 0)]
    short = size - len(stayers) - sum(free.values())
    problems = []
    if size < 1:
        problems.append(f"a world of {size} ranks; at least 1")
    if strangers := sorted({*leave} - {*world}):
        problems.append(f"members {strangers} are not in the world; it has {sorted(world)}")
    if size > 0 and not stayers:
        problems.append(f"all {len(world)} ranks would leave; at least one stays, to hand the state on")
    if stayers and short > 0:
        problems.append(f"{size} ranks need {short} more places than are free; nearest: {size - short} ranks")
    if problems:
        raise MembershipError("; ".join(problems))
    there: dict[int, list[int]] = {}
    for member in stayers:
        there.setdefault(nodes[member], []).append(member)
    there |= {node: [] for node in sorted(free) if node not in there}
    room, newcomers, number = dict(free), {}, first
    spares = {node: list(members) for node, members in ready.items()}
    for _ in range(size - len(stayers)):
        node = min(
            (node for node in room if room[node]), key=lambda node: (not spares.get(node), len(there[node]), node)
        )
        member = spares[node].pop(0) if spares.get(node) else number
        number += member == number
        room[node] -= 1
        there[node].append(member)
        newcomers[member] = node
    return NextWorld(
        new=tuple(member for group in there.values() for member in group),
        leavers=tuple(member for member in world if member not in stayers),
        newcomers=newcomers,
    )
