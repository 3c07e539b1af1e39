"""Full digests of the new state against the old, beside the new layout's first forward and backward."""

import logging
import threading
from collections.abc import Sequence

import torch

from dynatrain.cluster.kernel import aside
from dynatrain.execute.exchange import Exchange
from dynatrain.execute.pieces import Pieces
from dynatrain.train.agreement import Objection, objection_of
from dynatrain.train.before_step import BeforeStep
from dynatrain.train.channel import Channel
from dynatrain.train.proof import Proof
from dynatrain.train.world import World
from dynatrain.train.written import REMEDY, Watch

_LOG = logging.getLogger(__name__)

_SHOWN = 4
"""Tensors that were written and are named; the rest is counted."""


class Check:
    """Compares digests in a thread of its own; the training thread asks for the outcome.

    Args:
        channel: to the other ranks.
        moves: has moved everything, and may have its checksums still to compare.
        proof: takes the digests.
        saved: gets the buffers' values, which the step under way overwrites.
        keeps_old: the old pieces are whole, so that an index can be named.
    """

    def __init__(self, channel: Channel, moves: Exchange, proof: Proof, saved: BeforeStep, *, keeps_old: bool) -> None:
        self._channel = channel
        self._moves = moves
        self._proof = proof
        self._saved = saved
        self._keeps_old = keeps_old
        self._old: Pieces = {}
        self._new: Pieces = {}
        self._watch: Watch | None = None
        self._objection: Objection | None = None
        self._thread = threading.Thread(target=self._run, name=f"check-{channel.number}", daemon=True)

    def start(self, old: Pieces, new: World) -> None:
        """Begin.

        Args:
            old: the pieces from before; in ``tight`` their digests were taken.
            new: the world that has what arrived.
        """
        self._old = old
        try:
            self._new = new.pieces(self._channel.party.rank, self._channel.party.device)
            # The step writes buffers: they are digested, and if need be brought back, as they were before it.
            self._saved.keep_buffers(self._new)
            self._watch = Watch(new, self._new, closely=False)
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            self._objection = objection_of(problem)
        self._thread.start()

    def outcome(self, seconds: float) -> Objection | None:
        """Wait for the digests at most that long; what speaks against the commit.

        Digests that differ are taken again, on all ranks: the loop may have written what was being digested, and have
        put it back.
        """
        self._thread.join(seconds)
        if self._objection is not None and self._objection.proven and self._proof.differs:
            self._look_again()
        if self._objection is None and self._proof.report is None:
            return objection_of(TimeoutError("the digests were not compared in time"))
        return self._objection

    def end(self, seconds: float) -> bool:
        """Have the thread read no piece any more, so that their memory can go; whether it ended in time."""
        self._proof.given_up = True
        self._thread.join(seconds)
        self._proof.given_up = False  # the way back takes digests, too
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with self._channel.timed("check"):
                after = self._digest_after()
                self._channel.ask("check", None, self._objection)
                sides = self._old if self._keeps_old else None, self._saved.under(self._new)
                if wrong := self._proof.judge(after, *sides, self._channel.group("check")):
                    self._objection = Objection(why=wrong, proven=True)
        except Exception as error:  # noqa: BLE001 - told to all ranks
            self._objection = objection_of(error)

    def _look_again(self) -> None:
        assert self._objection is not None
        try:
            written = self._channel.ask("again", sorted(self._watch.written()) if self._watch else [], None)
            new = self._saved.under(self._new)
            after = self._proof.after(new)
            wrong = self._proof.judge(after, self._old if self._keeps_old else None, new, self._channel.group("check"))
        except Exception as error:  # noqa: BLE001 - told to all ranks
            self._objection = objection_of(error)
            return
        names = named_writes(written)
        self._objection = Objection(why="; ".join(filter(None, [names, wrong])), proven=True) if wrong else None
        if not wrong and self._channel.party.rank == 0:
            _LOG.warning(
                "%s; it was put back: digests are equal now", names or "digests differed when they were first taken"
            )

    def _digest_after(self) -> torch.Tensor:
        after = torch.empty(0)
        try:
            self._channel.at("check")
            self._moves.confirm(self._channel.party.deadline)
            # A rank that is a little behind still answers the last question of the move, and would wait for the digests
            # of the others on its processor. Only for what sends nothing: gloo's threads spin until a thread that was
            # halted inside it, because of its lower priority, leaves it, which then it never does.
            with aside():
                self._proof.note(self._old)
                after = self._proof.after(self._saved.under(self._new))
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            self._objection = self._objection or objection_of(problem)
            self._moves.transport.close()  # others may wait for this rank's checksums
        return after


def named_writes(told: Sequence[Sequence[str]]) -> str:
    """What the loop wrote on which rank before the first update, for people; empty where torch has counted nothing.

    Args:
        told: by rank, what was written there, as ``tensor state``.
    """
    ranks: dict[str, list[int]] = {}
    for rank, names in enumerate(told):
        for name in names:
            ranks.setdefault(name, []).append(rank)
    if not ranks:
        return ""
    words = [f"{name} on ranks {of}" for name, of in list(ranks.items())[:_SHOWN]]
    if more := len(ranks) - len(words):
        words.append(f"{more} more")
    return f"written between the switch and the first update: {', '.join(words)}; {REMEDY}"
