"""A question that every rank answers with something to tell the others."""

from dataclasses import dataclass
from typing import Any

from dynatrain.cluster.board import Board


class SwitchAbortedError(RuntimeError):
    """A switch was given up before its commit; the text says why and by whom, equally on every rank."""


@dataclass(frozen=True, slots=True)
class Everyone:
    """What all ranks told, by rank."""

    payloads: dict[int, Any]

    def in_order(self) -> list[Any]:
        """Payloads by rank."""
        return [self.payloads[rank] for rank in sorted(self.payloads)]


def exchange(board: Board, topic: str, rank: int, *, payload: Any, error: str = "", timeout: float) -> Everyone:
    """Tell all ranks ``payload`` and hear theirs; or learn, as all do, that one cannot go on.

    Args:
        board: shared by the ranks.
        topic: the question; never used before.
        rank: this rank.
        payload: anything that JSON can say.
        error: why this rank cannot go on; empty if it can.
        timeout: seconds to wait for the others.

    Raises:
        SwitchAbortedError: a rank reported an error, or was late; it is named.
    """
    last = board.vote(topic, rank, {"error": error, "payload": payload})
    if error or last:
        against = [f"rank {who}: {vote['error']}" for who, vote in sorted(board.votes(topic).items()) if vote["error"]]
        found = board.decide(topic, {"abort": "; ".join(against)} if against else {})
    else:
        found = board.decision(topic, timeout)
    told = board.votes(topic)
    board.leave(topic)
    if "abort" in found:
        raise SwitchAbortedError(found["abort"])
    return Everyone({who: vote["payload"] for who, vote in told.items()})
