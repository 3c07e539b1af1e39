"""Whether a switch changed a bit: digests of the old world and of the new one, compared by all ranks together."""

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dynatrain.execute.census import (
    DigestReport,
    boxes_of_copy,
    compare,
    digest_vector,
    unequal_copies,
)
from dynatrain.execute.locate import Side, first_unlike
from dynatrain.execute.pieces import Piece, Pieces
from dynatrain.execute.transport import TransportError
from dynatrain.plan.keepers import cells
from dynatrain.plan.left import Left
from dynatrain.plan.plan import Granule, Loss
from dynatrain.space.box import Box, whole
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue

Elsewhere = Callable[[int, Mapping[Granule, Box]], Mapping[Granule, Piece]]

_SHOWN = 4
"""Pieces that differ and are named; the rest is counted."""


@dataclass(slots=True, kw_only=True)
class Proof:
    """The digests of one switch on one rank.

    Methods that talk to the other ranks are called by all, over a group that nothing else uses meanwhile.

    Attributes:
        catalogue: all tensors.
        old: ownership before.
        new: ownership after.
        rank: this rank.
        lost: pieces of ranks that are lost, for which this one answers; see :func:`in_place_of_lost`.
        counts: whether this rank's own pieces are those of the step; after a loss they may not be.
        before: this rank's share of the digests of the old pieces; None until :meth:`note`.
        mended: copies that differed before, and were given the values of copy 0.
        report: the verdict, equal on all ranks; None until :meth:`judge`.
        given_up: set by another thread to end what is being digested, whose memory is about to go.
    """

    catalogue: Catalogue
    old: Ownership
    new: Ownership
    rank: int
    lost: dict[int, Mapping[Granule, Piece]] = field(default_factory=dict)
    counts: bool = True
    before: torch.Tensor | None = None
    mended: int = 0
    report: DigestReport | None = None
    given_up: bool = False

    def note(self, pieces: Pieces) -> None:
        """Digest the old pieces, once; the next calls change nothing."""
        if self.before is None:
            own = pieces if self.counts else {}
            self.before = digest_vector(own, self.catalogue, self.old, self.new, self.rank, self._go_on, self.lost)

    def restored(self, pieces: Pieces) -> bool:
        """Whether the old pieces have the digests that were noted."""
        assert self.before is not None
        return bool(self.before.equal(digest_vector(pieces, self.catalogue, self.old, self.new, self.rank)))

    def note_mended(self, pieces: Pieces, copies: int) -> None:
        """Digest the old pieces anew: so many copies of them were written."""
        self.before, self.mended = None, copies
        self.note(pieces)

    def find_unequal(self, group: dist.ProcessGroup) -> tuple[tuple[str, str, int], ...]:
        """The ``(tensor, state, copy)`` of old copies that differ from the first one."""
        assert self.before is not None
        return unequal_copies(_total(self.before, group), self.catalogue, self.old, self.new)

    def stand_in(self, loss: Loss, pieces: Pieces, kept: Elsewhere) -> None:
        """After a loss, before :meth:`note`: answer for those who have not the state of the step.

        Arguments as of :func:`in_place_of_lost`.
        """
        self.counts = self.rank in Left(loss).own
        self.lost = in_place_of_lost(self.catalogue, self.old, self.rank, loss, pieces, kept)

    def after(self, pieces: Pieces) -> torch.Tensor:
        """This rank's share of the digests of the new pieces."""
        return digest_vector(pieces, self.catalogue, self.new, self.new, self.rank, self._go_on)

    @property
    def differs(self) -> bool:
        """Whether new pieces were found to differ from the old ones; equal on all ranks."""
        return self.report is not None and not self.report.unequal and bool(self.report.differing)

    def _go_on(self) -> None:
        if self.given_up:
            raise TimeoutError("the digests were not taken in time")

    def judge(self, after: torch.Tensor, old: Pieces | None, new: Pieces, group: dist.ProcessGroup) -> str:
        """Compare all digests; what is wrong, equally on all ranks, or empty.

        Args:
            after: of :meth:`after`.
            old: the old pieces; None where they are gone, and then no index can be named.
            new: the new pieces.
            group: of all ranks.
        """
        self._go_on()
        assert self.before is not None
        both = _total(torch.cat([self.before, after]), group)
        before, after = both[: len(self.before)], both[len(self.before) :]
        self.report = compare(before, after, self.catalogue, self.old, self.new)
        if self.report.unequal:
            return self.name_unequal(self.report.unequal, old, group)
        if not self.report.differing:
            return ""
        return "digests differ after the move: " + self._name_differing(self.report, old, new, group)

    def _name_differing(self, report: DigestReport, old: Pieces | None, new: Pieces, group: dist.ProcessGroup) -> str:
        words = [f"{d.tensor} {d.state} on rank {d.rank} in box {d.box}" for d in report.differing[:_SHOWN]]
        first = report.differing[0]
        if old is not None:
            granule = self.granule(first.tensor, first.state)
            sides = self._side(old, self.old, granule, 0), Side(new, {first.rank: first.box})
            index = first_unlike(*sides, granule, first.box, self.rank, lambda shares: _total(shares, group))
            words[0] += f", first at index {index}"
        if more := len(report.differing) - len(words):
            words.append(f"{more} more")
        return "; ".join(words)

    def name_unequal(
        self, unequal: tuple[tuple[str, str, int], ...], old: Pieces | None, group: dist.ProcessGroup
    ) -> str:
        """The first of the unequal copies, with the first index at which it differs, for people; the rest counted."""
        tensor, state, copy = unequal[0]
        said = f"copies 0 and {copy} of {tensor} {state} differed before the switch"
        if old is not None:
            granule = self.granule(tensor, state)
            one, other = (self._side(old, self.old, granule, which) for which in (0, copy))
            box = whole(self.catalogue[granule[0]].state_shape(self.catalogue[granule[0]].states[granule[1]]))
            index = first_unlike(one, other, granule, box, self.rank, lambda shares: _total(shares, group))
            said += f", first at index {index}: ranks {one.holder(index)} and {other.holder(index)} held other bits"
        if more := len(unequal) - 1:
            said += f"; and {more} more copies"
        return said

    def granule(self, tensor: str, state: str) -> Granule:
        """The number of a state, by names."""
        index = next(i for i, one in enumerate(self.catalogue) if one.name == tensor)
        number = next(n for n, one in enumerate(self.catalogue[index].states) if one.name == state)
        return index, number

    def _side(self, pieces: Pieces, ownership: Ownership, granule: Granule, copy: int) -> Side:
        tensor = self.catalogue[granule[0]]
        return Side(pieces, boxes_of_copy(tensor, tensor.states[granule[1]], ownership, copy))


def in_place_of_lost(
    catalogue: Catalogue, old: Ownership, rank: int, loss: Loss, pieces: Pieces, kept: Elsewhere
) -> dict[int, Mapping[Granule, Piece]]:
    """The pieces for which ``rank`` answers in the digests in place of ranks that have not the state of the step.

    Those are the lost ones, and survivors whose own pieces are of no step or of another; each of their boxes has one
    survivor that answers. So the digests before are those of the whole state, and what was taken from a copy, a keeper
    or a file is held against it.

    Args:
        catalogue: all tensors.
        old: ownership before; lost ranks have numbers in it, behind those of all others.
        rank: this rank.
        loss: who is lost, and what is left.
        pieces: this rank's own, of the loss's step.
        kept: ``kept(owner, boxes)``: pieces of the loss's step that are another's: of a ward, or out of files.
    """
    left, found, read = Left(loss), dict[int, Any](), dict[int, dict[Granule, Box]]()
    survivors = sorted({*old.layout.ranks} - loss.lost)
    for granules, box, owners, _ in cells(catalogue, old):
        gone = {*owners} - left.own
        holders = left.holders(owners) if gone else ()
        for owner in gone:
            if (holders[0] if holders else survivors[owner % len(survivors)]) != rank:
                continue
            if holders and rank in owners:
                found.setdefault(owner, {}).update({granule: pieces[granule] for granule in granules})
            else:
                read.setdefault(owner, {}).update(dict.fromkeys(granules, box))
    for owner, boxes in read.items():
        found[owner] = ChainMap(found.get(owner, {}), kept(owner, boxes))
    return found


def _total(shares: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the ranks, mod 2^64.

    Raises:
        TransportError: some rank did not come, or is gone. Whoever merely waited for it is not the cause.
    """
    total = shares.clone()
    try:
        dist.all_reduce(total, group=group)
    except RuntimeError as error:
        others = [rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group)]
        raise TransportError(others, str(error)) from error
    return total
