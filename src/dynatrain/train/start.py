"""Where an order begins: told and asked at every step edge, until all ranks know it.

A crossing begins at a step edge of the old world, agreed on by its ranks alone, on the crossing's board. None of them
is ready before all newcomers have said there that they are warm; they are looked for at each edge, and waited for at
the last one before a step that was promised.
"""

import time
from collections.abc import Callable

from dynatrain.cluster.board import Go
from dynatrain.train.attempt import STARVED, Attempt
from dynatrain.train.order import Order
from dynatrain.train.party import Party

_POLL_SECONDS = 0.005

_PENDING = (
    "gradients are pending at every edge: since each update a forward has run with gradients on, or a gradient was "
    "written, and no update after it. Validate under torch.no_grad(), end a step of sw.steps behind its "
    "optimizer.step(), or divide it by sw.step_parts and switch inside it"
)


class Start:
    """One rank's way to the common beginning of one order; the argument why it is common stands in ``board``.

    Args:
        party: this rank.
        order: what is to begin.
        attempt: of a switch, its preparation started; None for what needs none.
        busy: whether this rank cannot begin yet.
    """

    def __init__(self, party: Party, order: Order, attempt: Attempt | None, busy: Callable[[], bool]) -> None:
        crossing = attempt.way.crossing if attempt else None
        self._party = party
        self._order = order
        self._attempt = attempt
        self._busy = busy
        self._crossing = crossing
        self._board = attempt.way.gate if attempt else party.board
        self._number = crossing.generation if crossing else order.turn
        self._told_at = 0.0
        self._pending_since = 0.0

    def look(self, edge: int, step: int) -> Go | None:
        """Tell the others how far this rank is, and see what was decided.

        Args:
            edge: number of the edge at which this rank is.
            step: the next step.

        Returns:
            Where to begin, or that the switch was given up; None while that is open.
        """
        if not self._told_at:
            self._tell(edge, step)
        go = self._board.go_edge(self._number)
        if go is None and (waited := self._overdue()):
            go = self._give_up(waited)
        return go

    def starves(self, edge: int) -> Go | None:
        """At an edge at which the order could begin, gradients wait for a later step, on all ranks alike.

        Returns:
            That the order is given up, on all ranks at one edge; None while they go on waiting.
        """
        self._pending_since = self._pending_since or time.monotonic()
        found = self._board.starved(self._number)
        waited = time.monotonic() - self._pending_since
        if found is None and waited > self._party.patience:
            self._board.starve(self._number, edge, f"{_PENDING} ({waited:.3g} s)")
        if found is None or edge < found[0]:
            return None
        if self._crossing is not None:
            self._board.post(STARVED, found[1])  # newcomers know the edge that was agreed on, and wait for it
        return Go(edge=-1, reason=found[1])

    def give_up(self, reason: str) -> Go:
        """Propose not to begin; what stands: the ranks may have decided before."""
        return self._board.give_up(self._number, reason)

    def done(self) -> None:
        """This rank knows where to begin, and looks no more."""
        if self._crossing is None:  # else a newcomer may look later; the keys go with the crossing's board
            self._board.done_with(self._number)
            if self._pending_since:
                self._board.leave(f"starved/{self._number}")

    def _give_up(self, waited: float) -> Go:
        if self._attempt is not None and (cold := self._attempt.way.cold()):
            return self._board.give_up(self._number, f"{cold} not warm after {waited:.3g} s")
        return self._board.overdue(self._number, waited)

    def _tell(self, edge: int, step: int) -> None:
        """Say that this rank is ready, or why it never will be, as soon as either is known."""
        attempt, order, party = self._attempt, self._order, self._party
        due = order.at < 0 or step >= order.at - 1
        # A step that was promised is waited for. Not at the edge of the decision itself: a rank that has yet to hear of
        # it trains on, and its step needs this one.
        if attempt is not None and order.at >= 0 and due and edge > order.edge:
            attempt.join(party.deadline)
            self._await_newcomers(attempt)
        if self._busy() or (attempt is not None and not attempt.prepared):
            return
        if attempt is not None and attempt.problem:
            self._board.give_up(self._number, attempt.problem)
        elif due and not (attempt is not None and attempt.way.cold()):
            self._board.ready(self._number, party.rank, edge)
        else:
            return
        self._told_at = time.monotonic()

    def _await_newcomers(self, attempt: Attempt) -> None:
        """Wait until they are warm; not for one that the agents know to be lost, nor longer than a phase may take."""
        end = time.monotonic() + self._party.deadline
        while attempt.way.cold() and self._board.go_edge(self._number) is None and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)

    def _overdue(self) -> float:
        """Seconds that this rank has waited for others, or for its own thread, where that is too long; else 0."""
        deadline = self._party.patience
        if self._told_at:
            waited, patience = time.monotonic() - self._told_at, deadline
        elif self._attempt is None or (self._attempt.prepared and self._crossing is None):
            return 0.0  # a scheduled step is yet to come, or a save has a deadline of its own
        else:
            # Build and warm, also those of newcomers.
            waited, patience = time.monotonic() - self._attempt.began, 2 * deadline
        return waited if waited > patience else 0.0
