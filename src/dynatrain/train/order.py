"""What all ranks agreed to do next."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from dynatrain.observe.requests import CROSSINGS


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What all ranks agreed to do next.

    Attributes:
        turn: of the order in this job, from 1.
        number: of the switch in this run, from 1; 0 for what is no switch.
        layout: target of a switch, as text.
        members: of the world to come, by rank, where it has others than the present one; empty where it has the same.
        generation: number of that world; -1 where it is the present one.
        mode: ``keep``, ``tight`` or ``auto``.
        at: first step that is to run in the new layout; -1 for as soon as all are ready.
        after: micro-batches of that step that still run in the old layout; 0 for a switch at the step's edge.
        edge: step edge of rank 0 at which it was decided; the other ranks know of it by the edge after.
        verb: ``switch``; ``prepare``, which stops short of it; ``scale``, ``lend`` or ``reclaim`` (switches to other
            members); ``loss``, to those that are left; ``park``, ``unpark``, ``save`` or ``stop``.
        by: who asked.
        request: number of the request on the board; -1 for none.
        request_id: its id, or empty.
        deadline: seconds since 1970 after which it is no longer wanted; None for never.
    """

    layout: str
    members: tuple[int, ...] = ()
    generation: int = -1
    turn: int = 0
    number: int = 0
    mode: str = "auto"
    at: int = -1
    after: int = 0
    edge: int = -1
    verb: str = "switch"
    by: str = ""
    request: int = -1
    request_id: str = ""
    deadline: float | None = None

    @property
    def switches(self) -> bool:
        """Whether it is a switch, among the same members or not."""
        return self.verb in {"switch", "loss"} or self.verb in CROSSINGS

    @property
    def builds(self) -> bool:
        """Whether another world is built for it."""
        return self.switches or self.verb == "prepare"

    @property
    def numbered(self) -> bool:
        """Whether all state is moved by it, or is to be, so that it has a number among the run's switches."""
        return self.switches or self.verb in {"prepare", "park", "unpark"}

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Self:
        """From what JSON made of its fields."""
        return cls(**{**told, "members": tuple(told["members"])})
