"""Where a switch begins: told and asked at every step edge, until all ranks know it."""

import time

from dynatrain.cluster.board import Go
from dynatrain.train.attempt import Attempt


class Start:
    """One rank's way to the common beginning of one attempt; the argument why it is common stands in ``board``.

    Args:
        attempt: a switch whose preparation was started, or a stop.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._board = attempt.party.board
        self._told_at = 0.0

    def look(self, edge: int, step: int) -> Go | None:
        """Tell the others how far this rank is, and see what was decided.

        Args:
            edge: number of the edge at which this rank is.
            step: the next step.

        Returns:
            Where to begin, or that the switch was given up; None while that is open.
        """
        number = self._attempt.order.number
        if not self._told_at:
            self._tell(edge, step)
        go = self._board.go_edge(number)
        if go is None and (waited := self._overdue()):
            go = self._board.overdue(number, waited)
        return go

    def _tell(self, edge: int, step: int) -> None:
        """Say that this rank is ready, or why it never will be, as soon as either is known."""
        attempt, order, party = self._attempt, self._attempt.order, self._attempt.party
        due = order.at < 0 or step >= order.at - 1
        # A step that was promised is waited for. Not at the edge of the decision itself: a rank that has yet to hear of
        # it trains on, and its step needs this one.
        if order.verb == "switch" and order.at >= 0 and due and edge > order.edge:
            attempt.join(party.deadline)
        if order.verb == "switch" and not attempt.prepared:
            return
        if attempt.problem:
            self._board.give_up(order.number, attempt.problem)
        elif due:
            self._board.ready(order.number, party.rank, edge)
        else:
            return
        self._told_at = time.monotonic()

    def _overdue(self) -> float:
        """Seconds that this rank has waited for others, or for its own thread, where that is too long; else 0."""
        deadline = self._attempt.party.patience
        if self._told_at:
            waited, patience = time.monotonic() - self._told_at, deadline
        elif self._attempt.prepared:
            return 0.0  # a scheduled step is yet to come
        else:
            waited, patience = time.monotonic() - self._attempt.began, 2 * deadline  # build and warm
        return waited if waited > patience else 0.0
