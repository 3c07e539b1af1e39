"""What a rank brings to every switch: its number, its means of agreement, its memory, and the user's build."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from dynatrain.cluster.board import Board
from dynatrain.cluster.worlds import Worlds
from dynatrain.execute.memory import Nearest
from dynatrain.execute.pieces import Pool
from dynatrain.execute.transport import Transport
from dynatrain.layout.layout import Layout
from dynatrain.models.names import NameRule
from dynatrain.plan.schedule import ROUND_BYTES
from dynatrain.train.groups import GroupPool
from dynatrain.train.segments import Segments
from dynatrain.train.world import Build

PHASES = ("build", "warm", "quiesce", "move", "check", "commit")
"""Phases of a switch in order; the ones after ``warm`` are inside the stall, except that ``check`` overlaps a step."""

RECENT = 8
"""Steps whose longest counts for how long a rank may stay away."""

ENDS = ("committed", "aborted", "failed", "ready")
"""How a switch can end, or rest where it is prepared ahead."""

Hook = Callable[[str, int, int], None]
"""Told of ``(event, round, number of the switch)`` as a switch goes on; heartbeats report from here, tests inject
faults. Events: the phases, the executor's events of each round, ``bound`` (with the number of rounds: the new world has
what arrived), and at the end one of :data:`ENDS`, where state is parked then followed by ``parked``. The round is -1
where there is none. What it raises before the end fails the attempt."""


DataParallel = Literal["fixed", "free", "own"]
"""What a loop says of its data ranks: their number is part of its mathematics; it may change, as one global batch is
cut into equal shares; or the loop reduces gradients over them by itself, which is then not looked at."""


def _quiet(_event: str, _round: int, _switch: int) -> None:
    return


@dataclass(slots=True, kw_only=True)
class Party:
    """One rank's standing means. Shared by all its switches; the pools are mutated.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        member: number of this process in the run.
        members: of the world, by rank.
        generation: number of the world.
        worlds: the way into other worlds; None for a process that has one world alone.
        board: where ranks agree.
        groups: process groups.
        memory: counts the bytes of all state that this rank holds.
        device: where state lies.
        build: the user's build.
        names: the user's or the default rule of canonical names.
        factories: makers of objects that belong to an optimizer (schedulers), by label.
        segments: fused and padded tensors.
        deadline: seconds that each phase may take.
        budget: bytes over max(old, new) in ``tight``; 0 for the least that suffices.
        round_bytes: bytes of whole tensors in one round of ``keep`` among few ranks; more have larger ones.
        unequal_copies: what becomes of copies that differ before a switch.
        data_parallel: what the loop says of its data ranks.
        ranks_per_node: how ranks share machines; None for one machine.
        transport: makes the transport of a switch from its group; tests put a double in between.
        early: whether switches are decided before their first step: of a job that trains nothing, and so never comes to
            an update, and of several in one loop, whose updates could not be taken back together.
        hook: told of phases and rounds.
        rehearsed: layouts, with their members, in which a first update was rehearsed in this process; mutated.
    """

    rank: int
    world_size: int
    member: int
    members: tuple[int, ...]
    generation: int = 0
    worlds: Worlds | None = None
    board: Board
    groups: GroupPool
    memory: Pool
    device: torch.device
    build: Build
    names: NameRule
    factories: dict[str, Callable[[torch.optim.Optimizer], Any]]
    segments: Segments = field(default_factory=Segments)
    deadline: float = 60.0
    budget: int = 0
    round_bytes: int = ROUND_BYTES
    unequal_copies: Literal["refuse", "owner"] = "refuse"
    data_parallel: DataParallel = "fixed"
    ranks_per_node: int | None = None
    transport: Callable[[dist.ProcessGroup, range], Transport] = field(default_factory=Nearest)
    early: bool = False
    hook: Hook = field(default=_quiet)
    rehearsed: set[tuple[Layout, tuple[int, ...]]] = field(default_factory=set)
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def requests(self) -> Board:
        """Where requests are put up: on the run's own board, which outlives worlds."""
        return self.worlds.requests if self.worlds else self.board

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank: as the members have said, else as ``ranks_per_node`` shares the ranks out."""
        each = self.ranks_per_node or self.world_size
        said = self.worlds.nodes(self.members) if self.worlds else ()
        return said or tuple(rank // each for rank in self.everyone)

    def enter(self, other: "Party") -> None:
        """Go on in another world, whose party ``other`` is: who this rank is and where it agrees change, no more."""
        self.rank, self.world_size, self.generation = other.rank, other.world_size, other.generation
        self.members, self.board, self.groups = other.members, other.board, other.groups

    def note_step(self, seconds: float) -> None:
        """Remember how long a step took."""
        self._steps.append(seconds)

    @property
    def patience(self) -> float:
        """Seconds to wait for ranks that may still be in the step in which they are to hear of something.

        A rank hears of an order at its next step edge: the deadline counts from there, so a long step comes on top.
        """
        return self.deadline + self.longest_step

    @property
    def longest_step(self) -> float:
        """Seconds of the longest of the latest steps."""
        return max(self._steps, default=0.0)

    @property
    def everyone(self) -> range:
        """All ranks."""
        return range(self.world_size)
