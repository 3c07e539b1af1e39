"""Hosts that leave a run: when that begins, what becomes of their ranks, and when the run had better stop. Pure.

SIGTERM on one agent of several is the notice that its machine will be taken away: its ranks hand their state to the
others, and it ends. SIGTERM on all is the wish to end the run. Which of the two it is shows in who else was told; the
others are waited for a moment, so that those who were told together leave together. The agent that leads leaves
otherwise: its ranks and the others' stop, saved, and go on without it (:mod:`dynatrain.cluster.heirs`).
"""

from collections.abc import Callable, Collection
from typing import Literal

WISH_SECONDS = 1.5
"""From the last notice until hosts begin to leave: what one agent hears, the others hear within it."""

Verdict = Literal["wait", "go", "stop"]


def verdict(waited: Collection[float], grace: float) -> Verdict:
    """What to do about hosts that were told to leave by a signal, and have not left yet.

    Half of their grace is for handing over. The other half is kept for what remains where that does not succeed: the
    run is stopped, and saved, while all of its ranks are still there.

    Args:
        waited: seconds since each of them was told; at least one.
        grace: seconds from the notice until a host is taken away.
    """
    if max(waited) > grace / 2:
        return "stop"
    return "wait" if min(waited) < min(WISH_SECONDS, grace / 4) else "go"


def largest(most: int, layout_of: Callable[[int], str]) -> tuple[int, str]:
    """The largest world of at most ``most`` ranks, and its layout.

    Args:
        most: ranks that there may be.
        layout_of: the layout of so many ranks; raises ``ValueError`` where there is none.

    Raises:
        ValueError: there is none of any size; as ``layout_of`` said of ``most``.
    """
    first: ValueError | None = None
    for size in range(most, 0, -1):
        try:
            return size, layout_of(size)
        except ValueError as error:
            first = first or error
    raise first or ValueError("no rank would be left; at least one stays, to hand the state on")
