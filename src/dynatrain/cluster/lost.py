"""Members that are lost without warning, and the world that follows. Values and rules, pure.

A member is *lost* when its process has ended without a word of its own (a signal, the kernel), when it has given no
sign of life for as long as the agent's patience lasts, in which case it is killed, so that it never comes back; or when
its node's agent is silent for as long. One that raises an error is not lost: what fails in the user's code on one rank
would fail on whoever does its work next. That ends the run, as ever.

The world that follows has the survivors, as many of them as have a legal layout, the most first.
"""

from collections.abc import Callable, Mapping, Sequence

from dynatrain.cluster.causes import SAVED
from dynatrain.cluster.context import Report
from dynatrain.cluster.membership import MembershipError
from dynatrain.cluster.summons import Summons


def is_lost(end: Report) -> bool:
    """Whether a rank's end is a loss: it ended badly, and had no time for a word."""
    return end.kind == "ended" and not end.words and (end.signal != 0 or end.code not in (0, SAVED))


def aftermath(
    world: Sequence[int], lost: Mapping[int, str], *, generation: int, layout: Callable[[int], str]
) -> Summons:
    """What is summoned after a loss.

    Args:
        world: members by rank.
        lost: what has become of those that are gone, some of ``world``.
        generation: of the world to come.
        layout: of a world of so many ranks; raises ``ValueError`` where there is none.

    Raises:
        MembershipError: nobody is left, or no number of the survivors has a layout; with what was lost.
    """
    why = "; ".join(lost[member] for member in world if member in lost)
    survivors = tuple(member for member in world if member not in lost)
    refused = "nobody is left"
    for size in range(len(survivors), 0, -1):
        try:
            text = layout(size)
        except ValueError as error:
            refused = f"with {size} of {len(survivors)} survivors: {error}"
            continue
        return Summons(
            generation=generation,
            old=tuple(world),
            new=survivors[:size],
            newcomers=(),
            layout=text,
            stage="asked",
            lost=tuple(member for member in world if member in lost),
            why=why,
        )
    raise MembershipError(f"{why}; and the run cannot go on: {refused}")
