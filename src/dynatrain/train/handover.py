"""Handing over in ``tight`` mode: all ranks agree on every round, and what was handed over can be carried back."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from dynatrain.execute.pieces import Pieces
from dynatrain.execute.rounds import Executor, RoundRefused, backward
from dynatrain.execute.transport import Transport
from dynatrain.plan.build import rank_plan
from dynatrain.plan.plan import Granule, Schedule
from dynatrain.train.agreement import Objection, SwitchAbortedError, objection_of
from dynatrain.train.blueprint import may_adopt
from dynatrain.train.party import Party
from dynatrain.train.proof import Proof
from dynatrain.train.world import World

Ask = Callable[..., list[Any]]
"""``exchange`` of one switch: ``(question, payload, objection, seconds)`` to all payloads by rank."""


class RoundVotes:
    """One rank's votes on the rounds of one way.

    Args:
        ask: puts a question to all ranks.
        way: ``forth`` or ``back``; the first part of each question.
        rounds: how many rounds are voted on; 0 in ``keep``, where nothing is given up before the commit.
    """

    def __init__(self, ask: Ask, way: str, rounds: int) -> None:
        self._ask = ask
        self._way = way
        self._rounds = rounds
        self._next = 0

    def agree(self, number: int) -> bool:
        """Whether a round that arrived here arrived everywhere."""
        if number >= self._rounds:
            return True
        self._next = number + 1
        try:
            self._ask(f"{self._way}{number}", None, None)
        except SwitchAbortedError:
            return False
        return True

    def excuse(self, problem: Exception, objection: Objection) -> None:
        """Tell the ranks that wait at the end of the round under way that it did not arrive here."""
        # After a refusal nobody waits: all have heard it.
        if self._next < self._rounds and not isinstance(problem, RoundRefused):
            with suppress(SwitchAbortedError):
                self._ask(f"{self._way}{self._next}", None, objection)


def carry_back(
    party: Party,
    ask: Ask,
    executor: Executor | None,
    *,
    transport: Callable[[], Transport],
    ends: tuple[World, World],
    proof: Proof,
    old_pieces: Pieces,
    written: Mapping[Granule, torch.Tensor],
) -> None:
    """Bring back what was handed over, so that the old pieces have their old bits. On all ranks.

    Args:
        party: this rank.
        ask: puts a question to all ranks.
        executor: of the way forth; None where this rank had not begun.
        transport: makes a new transport among all ranks.
        ends: the old world and the new one.
        proof: has noted the old pieces' digests.
        old_pieces: where the bits belong.
        written: what the new pieces held of state that has been written since the move.

    Raises:
        SwitchAbortedError: it did not succeed on every rank; the text says where.
    """
    old, new = ends
    # Equal on all ranks: a round counts when its decision says so, and all ranks read the same decision.
    if executor is None or executor.journal.agreed == 0:
        return
    # Ranks come here far apart: one may have waited, twice the deadline, for a thread of digests to end.
    agreed = max(ask("back", executor.journal.agreed, None, 4 * party.deadline))
    objection, joined = None, None
    schedule = backward(executor.journal.schedule, agreed)
    votes = RoundVotes(ask, "back", agreed)
    try:
        joined = transport()
        for granule, tensor in written.items():
            executor.new[granule].tensor.copy_(tensor)
        way = executor.way_back(
            plan=_reverse(party, old, new, schedule), transport=joined, agreed=agreed, agree=votes.agree
        )
        way.run(party.deadline)
        way.release()
        if not proof.restored(old_pieces):
            raise SwitchAbortedError(f"rank {party.rank} has other bits than before", proven=True)
    except Exception as problem:  # noqa: BLE001 - told to all ranks
        objection = objection_of(problem)
        if joined is not None:
            joined.close()
        votes.excuse(problem, objection)
    ask("returned", None, objection)


def _reverse(party: Party, old: World, new: World, schedule: Schedule) -> Any:
    assert old.ownership is not None
    assert new.ownership is not None
    return rank_plan(
        old.catalogue,
        new.ownership,
        old.ownership,
        party.rank,
        schedule,
        ranks_per_node=party.ranks_per_node,
        adoptable=may_adopt(old, new.ownership),
    )
