"""Threads as ranks around one board, for tests of agreement."""

import threading
from collections.abc import Callable

from torch.distributed import Store

from dynatrain.cluster.board import Board


def together(world: int, connect: Callable[[int], Store], act: Callable[[Board, int], object]) -> list[object]:
    """What ``act`` gives on each rank, all at the same time."""
    found: list[object] = [None] * world
    boards = [Board(connect(rank), world) for rank in range(world)]

    def run(rank: int) -> None:
        found[rank] = act(boards[rank], rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
