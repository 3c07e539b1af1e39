"""A question that every rank answers with something to tell the others."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dynatrain.cluster.board import Board
from dynatrain.cluster.causes import names
from dynatrain.execute.rounds import RoundRefused
from dynatrain.execute.transport import TransportError

T = TypeVar("T")

HEAR_SECONDS = 0.5
"""How long a rank that must give up waits for the others' words. When a transfer breaks, every rank sees it within
milliseconds, and most of them name a neighbour that merely waited itself; who then says nothing is the cause."""

_POLL_SECONDS = 0.005


class SwitchAbortedError(RuntimeError):
    """A switch was given up before its commit; the text says why and by whom, equally on every rank.

    Attributes:
        proven: whether the new state was proven to be wrong, on any rank.
    """

    def __init__(self, why: str, *, proven: bool = False) -> None:
        self.proven = proven
        super().__init__(why)


class StartRefusedError(ValueError):
    """Some ranks cannot begin with what they were given; the text names them, equally on every rank."""


class SwitchFailedError(RuntimeError):
    """A switch in ``tight`` mode that could neither go on nor be carried back: the run must stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objection:
    """Why a rank cannot go on.

    Attributes:
        why: for people.
        echo: it only saw that another rank had failed; what the others say counts more.
        proven: the new state is proven to be wrong.
    """

    why: str
    echo: bool = False
    proven: bool = False


def objection_of(error: Exception) -> Objection:
    """What a rank tells the others of an error of its own."""
    if isinstance(error, SwitchAbortedError):
        return Objection(why=str(error), proven=error.proven)
    return Objection(why=words_of(error), echo=isinstance(error, TransportError | RoundRefused))


def words_of(error: BaseException) -> str:
    """An error in one line."""
    return str(error) if isinstance(error, SwitchAbortedError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class Everyone:
    """What all ranks told, by rank."""

    payloads: dict[int, Any]

    def in_order(self) -> list[Any]:
        """Payloads by rank."""
        return [self.payloads[rank] for rank in sorted(self.payloads)]


def exchange(
    board: Board, topic: str, rank: int, *, payload: Any, objection: Objection | None = None, timeout: float
) -> Everyone:
    """Tell all ranks ``payload`` and hear theirs; or learn, as all do, that one cannot go on.

    Args:
        board: shared by the ranks.
        topic: the question; never used before.
        rank: this rank.
        payload: anything that JSON can say.
        objection: why this rank cannot go on; None if it can.
        timeout: seconds to wait for the others.

    Raises:
        SwitchAbortedError: a rank objected, or was late; it is named.
    """
    against = None if objection is None else [objection.why, objection.echo, objection.proven]
    last = board.vote(topic, rank, {"against": against, "payload": payload})
    if not last and objection is not None:
        _hear(board, topic, min(HEAR_SECONDS, timeout))
    if last or objection is not None:
        found = board.decide(topic, _verdict(board, topic))
    else:
        found = board.decision(topic, timeout)
    told = board.votes(topic)
    board.leave(topic)
    if "abort" in found:
        raise SwitchAbortedError(found["abort"], proven=found.get("proven", False))
    return Everyone({who: vote["payload"] for who, vote in told.items()})


def on_every_rank(board: Board, topic: str, rank: int, work: Callable[[], T], *, timeout: float) -> T:
    """What ``work()`` gives on this rank, when it has succeeded on all of them.

    Raises:
        Exception: what ``work`` raised here, where it failed on every rank with the same words.
        StartRefusedError: it failed elsewhere, or otherwise; or a rank was late.
    """
    error: Exception | None = None
    try:
        done = work()
    except Exception as problem:  # noqa: BLE001 - told to all ranks
        error = problem
    try:
        exchange(
            board, topic, rank, payload=None, objection=None if error is None else objection_of(error), timeout=timeout
        )
    except SwitchAbortedError as refused:
        if error is not None and (str(refused) == words_of(error) or board.world_size == 1):
            raise error from None
        raise StartRefusedError(str(refused)) from error
    return done


def _hear(board: Board, topic: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while board.decided(topic) is None and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)


def _verdict(board: Board, topic: str) -> dict[str, Any]:
    """The decision that the votes so far ask for."""
    votes = board.votes(topic)
    against = {
        who: Objection(why=a[0], echo=a[1], proven=a[2]) for who, vote in votes.items() if (a := vote["against"])
    }
    if not against:
        return {}
    causes = {who: objection for who, objection in against.items() if not objection.echo}
    said = _say({who: objection.why for who, objection in (causes or against).items()}, len(votes))
    silent = () if causes else board.missing(topic)
    if silent:
        said = f"late {names(silent)}; {said}"
    return {"abort": said, "late": silent, "proven": any(objection.proven for objection in against.values())}


def _say(words: dict[int, str], voters: int) -> str:
    """What ranks said, once where several said the same, without names where all did."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(words.items()):
        by_text.setdefault(text, []).append(rank)
    if len(by_text) == 1 and len(words) == voters > 1:
        return next(iter(by_text))
    return "; ".join(f"{names(ranks)}: {text}" for text, ranks in by_text.items())
