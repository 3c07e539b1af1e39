"""A rank's seat in its world: what it needs to take part, and the sign that it does."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed import Store

from dynatrain.cluster.board import Board
from dynatrain.cluster.context import RankContext
from dynatrain.cluster.heart import Heart
from dynatrain.cluster.store import rank_stores


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A rank that takes part.

    Attributes:
        context: its place.
        board: where it agrees with the others.
        heart: where it says what it is at.
        store: for its process groups; never used by the board.
    """

    context: RankContext
    board: Board
    heart: Heart
    store: Store


@contextmanager
def take_seat(context: RankContext) -> Iterator[Seat]:
    """Take part: connect, and begin to beat.

    The first thing a rank does: one that has not sat down when the agent's patience ends counts as silent. Its entry
    function returns only when all ranks are through: the agent takes a rank that ends well before the others for lost.
    """
    shared, groups = rank_stores(context)
    board = Board(shared, context.world_size)
    with Heart(board, context.rank) as heart:
        yield Seat(context=context, board=board, heart=heart, store=groups)
