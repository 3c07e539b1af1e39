"""A rank's seat in its run: what it needs to take part, and the sign that it does."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed import Store

from dynatrain.cluster.alarm import Alarm
from dynatrain.cluster.board import Board
from dynatrain.cluster.context import RankContext
from dynatrain.cluster.heart import Heart
from dynatrain.cluster.store import rank_stores
from dynatrain.cluster.worlds import Worlds

_POLL_SECONDS = 0.02
NOTICE_SECONDS = 5.0
"""For the news of a loss to reach the ranks, from when the agents take somebody for lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A rank that takes part.

    Attributes:
        context: its place; of a spare, that to which it was called.
        board: the run's, for requests and their answers.
        worlds: where it agrees with the others of its world, and of the next.
        heart: where it says what it is at.
        store: for its process groups; never used by a board.
    """

    context: RankContext
    board: Board
    worlds: Worlds
    heart: Heart
    store: Store


@contextmanager
def take_seat(context: RankContext) -> Iterator[Seat]:
    """Take part: connect, and begin to beat; a spare then waits here until it is called.

    The first thing a rank does: one that has not sat down when the agent's patience ends counts as silent. Its entry
    function returns only when all ranks are through, unless it has left their world: the agent takes a rank that ends
    well before the others for lost.
    """
    run, groups = rank_stores(context)
    board = Board(run, context.world_size)
    with Heart(board, context.member) as heart:
        if context.spare:
            context = _called(board, context.member)
        worlds = Worlds(
            run=run,
            groups=groups,
            member=context.member,
            rank=context.rank,
            world_size=context.world_size,
            generation=context.generation,
            joins=context.joins,
            folder=context.folder,
            attempt=context.attempt,
            alarm=Alarm(run, joins=context.joins, notice=context.liveness_seconds + NOTICE_SECONDS),
        )
        worlds.say_node(context.node)
        yield Seat(context=context, board=worlds.requests, worlds=worlds, heart=heart, store=groups)


def call(board: Board, context: RankContext) -> None:
    """Tell a spare its place."""
    board.post(_call_key(context.member), context.to_json())


def _called(board: Board, member: int) -> RankContext:
    """Wait, without an end: an agent ends who is not wanted."""
    while (text := board.peek(_call_key(member))) is None:
        time.sleep(_POLL_SECONDS)
    return RankContext.from_json(text)


def _call_key(member: int) -> str:
    return f"call/{member}"
