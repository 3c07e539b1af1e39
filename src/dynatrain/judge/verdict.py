"""What the judge says of a plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynatrain.space.box import Box
from dynatrain.space.tensor import Tensor

SHOWN = 20
"""Problems of one kind that are written out; the rest are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How well the new pieces of one kind of state are covered, in bytes over all holders.

    Attributes:
        expected: bytes of the new pieces.
        written: bytes that adoption, relays and moves bring to them, repetitions included.
        twice: bytes that are brought more than once, by each repetition.
        missing: bytes that nothing brings.
    """

    expected: int = 0
    written: int = 0
    twice: int = 0
    missing: int = 0

    @property
    def complete(self) -> bool:
        """Every byte exactly once."""
        return self.expected == self.written and not self.twice and not self.missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Coverage by kind of state (``param``, ``exp_avg``, ...), and what is wrong: tensor, state, box and rank."""

    coverage: Mapping[str, Coverage] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the plan may be carried out."""
        return not self.problems


def shown(problems: list[str], what: str) -> tuple[str, ...]:
    """The first of ``problems``, and how many more of ``what`` there are."""
    more = len(problems) - SHOWN
    return (*problems[:SHOWN], f"{more} more {what}") if more > 0 else tuple(problems)


def named(tensor: Tensor, state: int) -> str:
    """A granule by its names: ``layers.0.wq.weight.exp_avg``."""
    return f"{tensor.name}.{tensor.states[state].name}"


def place(tensor: Tensor, state: int, box: Box, rank: int) -> str:
    """Where something is wrong: ``layers.0.wq.weight.exp_avg [0:4, 8:16] on rank 3``."""
    bounds = ", ".join(f"{start}:{stop}" for start, stop in box)
    return f"{named(tensor, state)} [{bounds}] on rank {rank}"
