"""From which step a world goes on that has lost ranks, and where each box of it comes from.

The newest step of which every box is left somewhere. The step that the survivors stand at is one where copies on
surviving ranks cover all that was lost: then no step is done again. Else it is the newest snapshot of which that holds,
counting what keepers have; going back to it every survivor needs its own pieces of that step, too. Else it is the
newest checkpoint, and what memory has of the checkpoint's own step need not be read.

The plan is then one like any other (:mod:`dynatrain.plan.build`), among the holders of a crossing, with the sources
that are left.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dynatrain.data.redone import Redone
from dynatrain.plan.errors import PlanError
from dynatrain.plan.keepers import cells
from dynatrain.plan.left import Left
from dynatrain.plan.plan import Granule, Kept, Loss
from dynatrain.space.box import Box, volume
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue

_NAMED = 3
"""Owners of one box that a gap names; the rest are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Why a world cannot go on from a step: a box that nobody has of it.

    Attributes:
        step: which one.
        name: of tensor and state.
        box: in the coordinates of the state.
        why: who had it, and what became of them.
        more: other boxes, of any granule, that nobody has either.
    """

    step: int
    name: str
    box: Box
    why: str
    more: int

    def __str__(self) -> str:
        bounds = ", ".join(f"{start}:{stop}" for start, stop in self.box)
        more = f" (and {self.more} boxes more)" if self.more else ""
        return f"step {self.step}: nobody has {self.name} [{bounds}]: {self.why}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """What a world with lost ranks goes on from.

    Attributes:
        loss: the step, and what is left of it: what the planner and the judge are given.
        now: the newest step that any rank stood at.
        passed: why not from a newer step: one gap of each, newest first.
        bytes: of the boxes that lost ranks held, once each: from ``copies``, ``keepers`` and ``files``.
    """

    loss: Loss
    now: int
    passed: tuple[Gap, ...]
    bytes: Mapping[str, int]

    def told(self, global_sequences: int) -> dict[str, Any]:
        """What a report says, in JSON's own types; ``global_sequences`` are the samples of a step."""
        again = Redone(first=self.loss.step, end=self.now, global_sequences=global_sequences)
        return {
            "lost": sorted(self.loss.lost),
            "step": self.loss.step,
            "now": self.now,
            "files": self.loss.files,
            "bytes": dict(self.bytes),
            "why_no_newer": [str(gap) for gap in self.passed],
            "redone": {"steps": again.steps, "samples": again.samples, "text": str(again)},
        }


def restore(
    catalogue: Catalogue, old: Ownership, *, lost: Collection[int], kept: Iterable[Kept], files: Collection[int] = ()
) -> Restore:
    """The newest step that every box can be had of. Equal on every rank for equal arguments, in whatever order.

    Args:
        catalogue: the tensors.
        old: the ownership of the world that has lost ranks.
        lost: these.
        kept: all that ranks had in memory, live pieces and snapshots; also what the lost ones had, so that a refusal
            can name it.
        files: steps of complete checkpoints, of which each has every box.

    Raises:
        PlanError: arguments that contradict each other, all at once; or there is no such step: with a gap of each step
            that anything is left of.
    """
    known = tuple(sorted(kept, key=lambda one: (one.step, one.owner, one.holder, one.live, one.complete)))
    _refuse_strangers(old, lost, known)
    now = max((one.step for one in known if one.live), default=max(files, default=0))
    passed = []
    for step in sorted({one.step for one in known} | {*files}, reverse=True):
        loss = Loss(lost=frozenset(lost), step=step, kept=known)
        gaps, sources = _sources(catalogue, old, loss)
        if gaps and step in files:
            loss = Loss(lost=loss.lost, step=step, kept=known, files=step)
        elif gaps:
            granule, box, owners = min(gaps)
            tensor = catalogue[granule[0]]
            name = f"{tensor.name}.{tensor.states[granule[1]].name}"
            passed.append(Gap(step=step, name=name, box=box, why=_why(loss, owners), more=len(gaps) - 1))
            continue
        return Restore(loss=loss, now=now, passed=tuple(passed), bytes=sources)
    raise PlanError(
        f"ranks {sorted(lost)} are lost, and of no step is everything left: "
        + ("; ".join(map(str, passed)) or "nothing was kept, and there is no checkpoint")
        + ". A checkpoint, or a snapshot with its keepers on other nodes, would do."
    )


def _sources(
    catalogue: Catalogue, old: Ownership, loss: Loss
) -> tuple[list[tuple[Granule, Box, tuple[int, ...]]], dict[str, int]]:
    """What no memory has, as ``(granule, box, owners)``, and the bytes of lost boxes by where they come from."""
    left = Left(loss)
    gaps = []
    sources = dict.fromkeys(("copies", "keepers", "files"), 0)
    for granules, box, owners, size in cells(catalogue, old):
        holders = left.holders(owners)
        if not holders:
            gaps += [(granule, box, owners) for granule in granules]
        if loss.lost.intersection(owners):
            kind = "files" if not holders else "copies" if holders[0] in owners else "keepers"
            sources[kind] += volume(box) * size
    return gaps, sources


def _why(loss: Loss, owners: tuple[int, ...]) -> str:
    """What became of those who could have a box that nobody has."""
    said = [_fate(loss, rank, rank, f"rank {rank}, which held it,") for rank in owners[:_NAMED]]
    said += [f"{len(owners) - _NAMED} more that held it have it no more"] if len(owners) > _NAMED else []
    if len(owners) == 1:
        keepers = {one.holder for one in loss.kept if one.owner == owners[0] != one.holder}
        said += [_fate(loss, keeper, owners[0], f"rank {keeper}, its keeper,") for keeper in sorted(keepers)]
        said += [] if keepers else ["it had no keeper"]
    return "; ".join(said)


def _fate(loss: Loss, holder: int, owner: int, who: str) -> str:
    if holder in loss.lost:
        return f"{who} is lost"
    had = [one for one in loss.kept if (one.holder, one.owner) == (holder, owner)]
    if any(one.step == loss.step for one in had):
        return f"{who} has it of step {loss.step} only in part"
    steps = sorted({one.step for one in had})
    return f"{who} has {f'it of steps {steps}' if steps else 'nothing'}"


def _refuse_strangers(old: Ownership, lost: Collection[int], kept: Iterable[Kept]) -> None:
    ranks = {*old.layout.ranks}
    problems = []
    if strangers := sorted({*lost} - ranks):
        problems.append(f"ranks {strangers} cannot be lost: the world has ranks {sorted(ranks)}")
    for one in kept:
        if not {one.holder, one.owner} <= ranks:
            problems.append(f"rank {one.holder} cannot keep pieces of rank {one.owner}: the world has {sorted(ranks)}")
        if one.live and (one.holder != one.owner or not one.complete):
            problems.append(f"live pieces are whole and their rank's own; rank {one.holder}'s of {one.owner} are not")
    if problems:
        raise PlanError("; ".join(problems))
