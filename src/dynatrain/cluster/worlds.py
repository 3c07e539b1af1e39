"""Where the worlds of a run meet: each on a board of its own, and so does each crossing, under the prefix of the run.

The run's own board (requests, answers, beats) outlives all worlds.
"""

from dataclasses import dataclass

from torch.distributed import PrefixStore, Store

from dynatrain.cluster.board import Board


def world_board(run: Store, generation: int, world_size: int) -> Board:
    """The board of one world: its turns and votes, counted by rank."""
    return Board(PrefixStore(f"world/{generation}", run), world_size)


def crossing_board(run: Store, generation: int, holders: int) -> Board:
    """The board of the crossing into a world, counted by holder.

    Where it begins is decided under the number ``generation``: ``give_up(generation, why)`` ends it before it has
    begun, for an agent, too, that sees a newcomer die.
    """
    return Board(PrefixStore(f"crossing/{generation}", run), holders)


def forget_others(run: Store, *generations: int) -> None:
    """Delete what stands on the boards of all worlds but these, and of the crossings into them.

    A crossing's board is not cleared by those who use it: one of them may be dead, or look late.
    """
    kept = {f"{what}/{generation}" for what in ("world", "crossing") for generation in generations}
    for key in run.list_keys():
        what, _, rest = key.partition("/")
        if what in {"world", "crossing"} and f"{what}/{rest.partition('/')[0]}" not in kept:
            run.delete_key(key)


@dataclass(frozen=True, kw_only=True, slots=True)
class Worlds:
    """What a process needs to go from one world of its run to the next.

    Attributes:
        run: the run's store, for boards.
        groups: the same over a connection of its own, to make process groups with.
        member: number of this process in the run.
        rank: its rank in the world in which it begins.
        world_size: ranks of that world.
        generation: of that world.
        joins: whether that world is yet to come, and this process a newcomer.
    """

    run: Store
    groups: Store
    member: int
    rank: int
    world_size: int
    generation: int = 0
    joins: bool = False

    @property
    def requests(self) -> Board:
        """The run's board."""
        return Board(self.run, self.world_size)

    def board(self) -> Board:
        """The board of the world in which this process begins."""
        return world_board(self.run, self.generation, self.world_size)
