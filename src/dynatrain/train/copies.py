"""Copies that should be equal and are not, before a switch: refused, or given the owner's values."""

import logging
import time
from collections.abc import Sequence
from typing import Literal

import torch.distributed as dist

from dynatrain.execute.exchange import Exchange
from dynatrain.execute.pieces import Pieces
from dynatrain.plan.mend import mend_plan
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.argument import ArgumentError
from dynatrain.train.proof import Proof

UnequalCopies = Literal["refuse", "owner"]
"""What becomes of copies that differ before a switch: it is refused, or all get the values of copy 0."""

POLICIES = ("refuse", "owner")

_LOG = logging.getLogger(__name__)


def check_policy(policy: str) -> None:
    """Refuse what is no policy.

    Raises:
        ArgumentError: with those that there are.
    """
    if policy not in POLICIES:
        raise ArgumentError(f"there is no policy {policy!r} for unequal copies; there are {', '.join(POLICIES)}")


def settle_copies(
    proof: Proof, moves: Exchange, pieces: Pieces, group: dist.ProcessGroup, policy: UnequalCopies, seconds: float
) -> None:
    """Compare all copies of the old state, and do with unequal ones what the user wants. On all ranks.

    With ``owner`` they are written in place, so that they stay equal even where the switch is given up afterwards.

    Args:
        proof: has noted the digests of ``pieces``; notes them anew where copies were mended.
        moves: of the switch, not yet begun; its transport and its memory serve this, too.
        pieces: of the old ownership.
        group: of all ranks.
        policy: what to do.
        seconds: for the transfer.

    Raises:
        SwitchAbortedError: copies differ; with tensor, state, ranks and first index.
    """
    found = proof.find_unequal(group)
    if not found:
        return
    said = proof.name_unequal(found, pieces, group)
    if policy == "refuse":
        raise SwitchAbortedError(said)
    if proof.rank == 0:
        _LOG.warning("%s; copy 0 is taken, as unequal_copies = 'owner' says", said)
    _mend(proof, moves, pieces, found, seconds)
    proof.note_mended(pieces, len(found))
    if left := proof.find_unequal(group):
        raise SwitchAbortedError(f"after copy 0 was taken: {proof.name_unequal(left, pieces, group)}")


def _mend(
    proof: Proof, moves: Exchange, pieces: Pieces, unequal: Sequence[tuple[str, str, int]], seconds: float
) -> None:
    which = [(proof.granule(tensor, state), copy) for tensor, state, copy in unequal]
    plan = mend_plan(proof.catalogue, proof.old, proof.rank, which)
    exchange = Exchange(plan=plan, catalogue=proof.catalogue, transport=moves.transport, pool=moves.pool)
    try:
        exchange.round(exchange.routes[0], pieces, pieces, time.monotonic() + seconds, lambda: None)
    finally:
        exchange.release()
