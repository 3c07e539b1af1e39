"""Carrying a plan out, round by round.

One round: allocate its targets, post, receive, compare checksums, agree with all ranks that it arrived; in ``tight``
mode then give up its sources. Old pieces are never written, so that until a round is agreed nothing is lost. The way
back after an abort in ``tight`` is the same code on a plan with the ownerships exchanged (:meth:`Executor.way_back`).

Memory beyond pieces: staging buffers, at most :func:`dynatrain.execute.exchange.staging_bound`, counted by the pool.
Checksums are a few bytes per move and not counted.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from dynatrain.execute.exchange import Exchange
from dynatrain.execute.pieces import Piece, Pieces, misfits
from dynatrain.execute.transport import Transport
from dynatrain.execute.wire import Route
from dynatrain.plan.plan import Granule, RankPlan, Schedule

Hook = Callable[[str, int], None]
"""Called with an event and the number of the round. Events: ``round_start``, ``posted`` (the first messages of the
round are under way), ``received`` (all arrived, checksums equal), ``agreed`` (all ranks said so; in ``tight`` the
sources are given up by then). What it raises fails the round."""

Target = Callable[[Granule], Piece | None]
"""Gives this rank's piece of a granule under the new ownership, or None where it will own none. In ``keep`` mode this
is the ``get`` of pieces made beforehand; in ``tight`` it allocates."""


class RoundRefused(RuntimeError):  # noqa: N818 - says what happened
    """Not all ranks agreed that a round arrived.

    Attributes:
        round: its number.
    """

    def __init__(self, number: int) -> None:
        self.round = number
        super().__init__(f"round {number} did not arrive intact on every rank")


@dataclass(slots=True, kw_only=True)
class Journal:
    """Which granules have changed hands. One writer: the executor.

    Attributes:
        schedule: of the plan.
        agreed: number of rounds that all ranks agreed on, counted on this rank. After a failure the ranks' counts may
            differ by one; the largest holds, because then the round arrived everywhere.
    """

    schedule: Schedule
    agreed: int = 0

    @property
    def handed_over(self) -> tuple[Granule, ...]:
        """Granules that are wholly new now, in order; all others are wholly old. None in ``keep``."""
        done = self.schedule.rounds[: self.agreed] if self.schedule.mode == "tight" else ()
        return tuple(granule for granules in done for granule in granules)


def backward(schedule: Schedule, agreed: int) -> Schedule:
    """The schedule of the way back: the ``agreed`` first rounds of ``schedule``, last one first."""
    return Schedule(rounds=schedule.rounds[:agreed][::-1], mode="tight")


class Executor:
    """Carries one rank's part of a judged plan out.

    On any failure of :meth:`run` it closes the transport, so that no peer waits on this rank, and raises. Then the
    journal says which granules are new; everything else is intact in the old pieces. The owner goes on with
    :meth:`abandon` (nothing was handed over) or with :meth:`way_back`.

    Args:
        exchange: of the plan; its transport is used by nobody else until ``run`` returns, and its pool holds the
            pieces of ``old`` already.
        old: what this rank holds; every granule that the plan reads. Written nowhere.
        target: where new pieces come from.
        agree: told that a round arrived intact here, answers whether it did on all ranks; called once a round by every
            rank that got so far. Must return False or raise, within its own deadline, where a rank did not.
        hook: told of events.

    Attributes:
        new: pieces of the new ownership so far; adopted ones are those of ``old``.
        journal: what has changed hands.
        ledger: payload bytes by (source rank, destination rank), both directions of this rank; (rank, rank) is what
            was laid out anew.

    Raises:
        ValueError: ``old`` does not fit the catalogue.
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        old: Pieces,
        target: Target,
        agree: Callable[[int], bool],
        hook: Hook,
    ) -> None:
        if wrong := misfits(old, exchange.catalogue):
            raise ValueError("pieces that cannot be moved:\n" + "\n".join(wrong))
        self.new: Pieces = {}
        self.journal = Journal(schedule=exchange.plan.schedule)
        self._exchange = exchange
        self._plan = exchange.plan
        self._catalogue = exchange.catalogue
        self._old = old
        self._target = target
        self._pool = exchange.pool
        self._agree = agree
        self._hook = hook
        self._adopted = frozenset(self._plan.adopted)
        self.ledger = exchange.ledger
        if self._plan.schedule.mode == "keep":
            self._make_targets([granule for granules in self._plan.schedule.rounds for granule in granules])

    def run(self, seconds: float) -> None:
        """Carry out all rounds.

        Args:
            seconds: from now to the end of the last transfer.

        Raises:
            TransportError: a peer is gone or late.
            CorruptMove: checksums of a move differ.
            RoundRefused: another rank did not receive a round intact.
        """
        deadline = time.monotonic() + seconds
        try:
            with torch.no_grad():
                for number, route in enumerate(self._exchange.routes):
                    self._round(number, route, deadline)
        except BaseException:
            self._exchange.transport.close()
            raise
        finally:
            self._exchange.release()

    def release(self) -> None:
        """After the commit: give back the old pieces that the new ownership does not adopt."""
        self._give_back(self._old, [granule for granule in self._old if granule not in self._adopted])

    def abandon(self) -> None:
        """After an abort: give back the new pieces of all granules that were not handed over."""
        kept = {*self.journal.handed_over, *self._adopted}
        self._give_back(self.new, [granule for granule in self.new if granule not in kept])

    def way_back(
        self, *, plan: RankPlan, transport: Transport, agreed: int, agree: Callable[[int], bool]
    ) -> "Executor":
        """The executor that carries what was handed over back into the old pieces, whose aliases are then alive again.

        Gives the new pieces of all other granules back first. Run it on every rank.

        Args:
            plan: from the new ownership to the old one, with the schedule ``backward(schedule, agreed)``.
            transport: a new one; the old one is closed.
            agreed: the largest count of agreed rounds among the ranks.
            agree: as for the way forth; its questions are others.
        """
        self.journal.agreed = agreed
        self.abandon()
        return Executor(
            exchange=Exchange(plan=plan, catalogue=self._catalogue, transport=transport, pool=self._pool),
            old={granule: piece for granule, piece in self.new.items() if granule in self.journal.handed_over},
            target=self._restored,
            agree=agree,
            hook=self._hook,
        )

    def _restored(self, granule: Granule) -> Piece | None:
        piece = self._old.get(granule)
        if piece is not None:
            self._pool.restore(piece)
        return piece

    def _round(self, number: int, route: Route, deadline: float) -> None:
        granules = self._plan.schedule.rounds[number]
        self._hook("round_start", number)
        if self._plan.schedule.mode == "tight":
            self._make_targets(granules)
        self._exchange.round(route, self._old, self.new, deadline, lambda: self._hook("posted", number))
        self._hook("received", number)
        if not self._agree(number):
            raise RoundRefused(number)
        # No event between these two lines: the journal and the memory tell the same story at any event.
        self.journal.agreed = number + 1
        if self._plan.schedule.mode == "tight":
            self._give_back(self._old, [g for g in granules if g in self._old and g not in self._adopted])
        self._hook("agreed", number)

    def _make_targets(self, granules: Sequence[Granule]) -> None:
        made = {}
        for granule in granules:
            if granule in self._adopted:
                self.new[granule] = self._old[granule]
            elif (piece := self._target(granule)) is not None:
                self.new[granule] = made[granule] = piece
        if wrong := misfits(made, self._catalogue):
            raise ValueError("targets that cannot be filled:\n" + "\n".join(wrong))

    def _give_back(self, pieces: Pieces, granules: Iterable[Granule]) -> None:
        for granule in granules:
            self._pool.give_back(pieces[granule])
