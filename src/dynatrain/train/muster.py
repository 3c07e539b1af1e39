"""How far each survivor of a loss is, and from which step all of them go on. Values and rules, pure.

**A step is applied on all or on none.** The last collective of a step before its update is its *coupling*: an
all-reduce over the world that no rank comes out of before every rank has come into it. The built-in trainer's is that
of the loss and the gradient norm; a loop that names none has one of a single element put before its update. Three
things follow. (1) When a rank is through the coupling of step k, every rank has all its gradients of step k: its
backward is behind it. (2) So a survivor of whom a loss has broken that coupling lacks nothing but its result, which is
equal on all ranks and some bytes long. (3) Whoever makes the update needs nobody else for it.

Hence the *muster*, the first question after a loss: each survivor tells the last coupling that it is through, with its
result. If any of them is through that of step k, those who wait in it take the result from there and make their update:
step k is applied on all. If none is, none has made the update, since that comes behind: step k is applied on none, its
gradients are dropped, and it is done again. What the lost rank had done is of no account: its state is gone with it. A
survivor that is lost before all have answered is named by the next loss, whose muster asks anew; once decided, the
answer stands, and whoever took a result has it to tell in the next muster.

An update that talks to other ranks itself (Muon's and Adafactor's do) can be broken in its midst. What that rank
trains with is then of no step, and counts for nothing: its boxes come from others, or from an older step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from dynatrain.plan.plan import Kept, Loss

Coupled = tuple[int, Any]
"""``(step, result)`` of a coupling."""


def decisive(told: Iterable[Coupled | None]) -> Coupled | None:
    """The newest coupling that any survivor is through; None where nobody is through any."""
    return max((one for one in told if one is not None), key=lambda one: one[0], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Where a survivor stands behind the muster, its own part of the step made or dropped.

    Attributes:
        step: so many steps are trained.
        torn: its update was broken off, and what it holds is of no step.
        edge: number of its step edge.
        turn: of the next order.
        switches: how many the run has had.
        files: steps of complete checkpoints that it sees, ascending.
        notes: snapshots in its memory: ``(step, whether its own is whole, wards by old rank, whether theirs are)``.
    """

    step: int
    torn: bool
    edge: int
    turn: int
    switches: int
    files: tuple[int, ...] = ()
    notes: tuple[tuple[int, bool, tuple[int, ...], bool], ...] = ()

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Self:
        """From what JSON made of its fields."""
        notes = tuple((step, own, tuple(wards), whole) for step, own, wards, whole in told["notes"])
        return cls(**{**told, "files": tuple(told["files"]), "notes": notes})


def memory(stands: Sequence[Stand], ranks: Sequence[int]) -> tuple[Kept, ...]:
    """What survivors have in memory, as the planner knows it, by old ranks.

    Args:
        stands: by survivor.
        ranks: the old rank of each.
    """
    found = []
    for rank, stand in zip(ranks, stands, strict=True):
        if not stand.torn:
            found.append(Kept(holder=rank, owner=rank, step=stand.step, live=True))
        for step, own, wards, whole in stand.notes:
            found.append(Kept(holder=rank, owner=rank, step=step, complete=own))
            found += [Kept(holder=rank, owner=ward, step=step, complete=whole) for ward in wards]
    return tuple(found)


def renumbered(loss: Loss, numbers: Sequence[int]) -> Loss:
    """A loss by old ranks, by holders: ``numbers[rank]`` is that of an old rank."""
    kept = (replace(one, holder=numbers[one.holder], owner=numbers[one.owner]) for one in loss.kept)
    return replace(loss, lost=frozenset(numbers[rank] for rank in loss.lost), kept=tuple(kept))
