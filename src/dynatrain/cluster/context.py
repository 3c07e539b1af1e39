"""What a rank is told when it starts, and what its parent tells the agent. Values only; no torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from dynatrain.observe.run import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """A rank's place in its world: the one argument of a rank's entry function.

    Attributes:
        member: number in the run, never used again; in the first world a member's rank.
        rank: number in the world in which it begins.
        node: its node, by the number that the agents of this attempt have.
        local_rank: its place on this node, which a later member may have again.
        world_size: ranks in the world.
        ranks_per_node: ranks of each node in the first world; None where all are on one.
        store_host: where the store listens.
        store_port: its port.
        store_prefix: prefix of all keys of this run.
        run: path of the run folder.
        device: ``cpu`` or ``cuda:N``.
        backend: ``gloo`` or ``nccl``.
        generation: number of the world in which it begins.
        attempt: number of the run's agent: 0 for the first.
        realtime: whether ranks run in the real-time scheduling class.
        interface: of the network, that its process groups are to use; empty for what torch finds.
        joins: whether that world is yet to come, and this rank a newcomer.
        spare: whether it is of no world yet, and is to wait until it is called to one.
        liveness_seconds: without a sign of life for longer, agents take somebody for lost.
    """

    member: int
    rank: int
    node: int
    local_rank: int
    world_size: int
    ranks_per_node: int | None
    store_host: str
    store_port: int
    store_prefix: str
    run: str
    device: str
    backend: str
    generation: int
    attempt: int
    realtime: bool
    interface: str = ""
    joins: bool = False
    spare: bool = False
    liveness_seconds: float = 0.0

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return RunFolder(Path(self.run))

    def to_json(self) -> str:
        """As text; :meth:`from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One message of the fork server to its agent.

    Attributes:
        kind: ``ready``; ``broken`` (it cannot fork; ``words`` say why); ``forked``, ``stopped``, ``continued``,
            ``ended`` (of one rank).
        member: which rank, by its number in the run; -1 for the server itself.
        pid: its process.
        code: exit code of an ended rank; 0 where a signal ended it.
        signal: the signal that ended or stopped it; 0 for none.
        words: the error text that a rank left, or empty.
        spoken: when it left them, in seconds of the machine's monotonic clock.
    """

    kind: Literal["ready", "broken", "forked", "stopped", "continued", "ended"]
    member: int = -1
    pid: int = 0
    code: int = 0
    signal: int = 0
    words: str = ""
    spoken: float = 0.0

    def to_json(self) -> str:
        """As text; :meth:`from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote."""
        return cls(**json.loads(text))
