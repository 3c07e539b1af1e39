"""Who leads a run after the agent that led it was lost, and where its ranks are then. Values and rules, pure.

**Who.** One file in the run's folder says which agent drives the run, under a lock of the disk: whoever puts its mark
there in the place of the one that is gone leads, and all others find it there. So two never lead, also where they do
not hear of each other; the disk has to lock and rename alike for all machines. The lowest node tries first, each later
one a moment after the one before it.

**When.** The one before counts as gone when its process has ended, as the kernel of its machine says, or when it has
given no sign of life on the disk for a while. One that lives and cannot be reached keeps the run: who is cut off ends.

**What.** Ranks that are left begin anew, as many as have a legal layout, from the newest checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dynatrain.cluster.parting import largest
from dynatrain.cluster.summons import Newcomer

TURN_SECONDS = 1.0
"""Between the attempts of two nodes to lead."""
SILENT_SECONDS = 4.0
"""Without a sign of life on the disk, from when the store is lost; an agent gives one every second."""
CUT_OFF_SECONDS = 12.0
"""After which an agent that the others' lead cannot hear ends, where that lead lives."""

Fate = Literal["gone", "lives", "followed", "over", "open"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Legacy:
    """What an agent knows of its run when it has lost the one that leads.

    Attributes:
        attempt: number of the run's agent that is lost.
        node: this agent's.
        heirs: nodes that may lead after it, this one among them.
        slots: places of this node that had ranks.
        world_size: ranks of the world.
        layout: theirs, as text.
        host: where the store was; empty where that is not known.
        port: its port.
        here: this machine's address, as others reach it.
        handed: whether the agent that led has left, and said so.
    """

    attempt: int
    node: int
    heirs: tuple[int, ...]
    slots: tuple[int, ...]
    world_size: int
    layout: str
    host: str
    port: int
    here: str
    handed: bool = False

    @property
    def head_start(self) -> float:
        """Seconds that others have before this agent tries to lead."""
        return sorted(self.heirs).index(self.node) * TURN_SECONDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """What is seen of the agent that led.

    Attributes:
        attempt: of the run's agent, as its folder says.
        exit: how that has ended; None where it has not said so.
        ended: whether its process is known to have ended, or it has said that it leaves.
        silent: seconds without a sign of life on the disk.
        waited: seconds since it was lost.
    """

    attempt: int
    exit: int | None
    ended: bool
    silent: float
    waited: float


def fate(sign: Sign, attempt: int) -> Fate:
    """What has become of the agent of ``attempt``."""
    if sign.attempt != attempt:
        return "followed"
    if sign.exit is not None:
        return "over"
    if sign.ended or sign.silent >= SILENT_SECONDS:
        return "gone"
    return "lives" if sign.waited >= CUT_OFF_SECONDS else "open"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seating:
    """The first world after a succession.

    Attributes:
        nodes: new number of each node, by its old one; the new lead is 0.
        layout: as text.
        seats: every rank's place, by rank.
    """

    nodes: Mapping[int, int]
    layout: str
    seats: tuple[Newcomer, ...]


def brought(
    slots: Mapping[int, Sequence[int]], devices: Mapping[int, int] | None, most: int
) -> Mapping[int, Sequence[int]]:
    """The places that ranks may have; where none is left that had one, those of hosts that were kept as places.

    Args:
        slots: places of each node that had ranks.
        devices: CUDA devices of each; None on CPUs, which take as many ranks as are wanted.
        most: ranks that there are to be at most.
    """
    if any(slots.values()):
        return slots
    each = -(-most // len(slots))
    return {node: range(each if devices is None else devices[node]) for node in slots}


def seated(
    lead: int, slots: Mapping[int, Sequence[int]], layout: str, most: int, resize: Callable[[str, int, str], str]
) -> Seating:
    """Who is where.

    Args:
        lead: old number of the node that leads.
        slots: places for ranks of each node that has come, by its old number.
        layout: the present one, as text.
        most: ranks that there are to be at most: as many as there were.
        resize: as of :class:`~dynatrain.cluster.meeting.Job`.

    Raises:
        ValueError: no number of ranks has a layout.
    """
    order = [lead, *sorted(node for node in slots if node != lead)]
    places = [(number, slot) for number, node in enumerate(order) for slot in slots[node]]
    size, text = largest(min(most, len(places)), lambda size: resize(layout, size, ""))
    seats = tuple(Newcomer(member=rank, node=node, slot=slot) for rank, (node, slot) in enumerate(places[:size]))
    return Seating(nodes={node: number for number, node in enumerate(order)}, layout=text, seats=seats)
