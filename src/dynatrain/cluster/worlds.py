"""Where the worlds of a run meet: each on a board of its own, and so does each crossing, under the prefix of the run.

The run's own board (requests, answers, beats) outlives all worlds.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.distributed import PrefixStore, Store

from dynatrain.cluster.alarm import Alarm
from dynatrain.cluster.board import Board
from dynatrain.observe.run import RunFolder

COMMIT = "crossing/commit"
"""Topic of the question by which a crossing is committed; its decision has ``abort`` in it where it was not."""


Broken = Callable[[], str]


def world_board(run: Store, generation: int, world_size: int, broken: Broken = str) -> Board:
    """The board of one world: its turns and votes, counted by rank.

    Args:
        run: the run's store.
        generation: of the world.
        world_size: its ranks.
        broken: as of :class:`~dynatrain.cluster.board.Board`.
    """
    return Board(PrefixStore(f"world/{generation}", run), world_size, broken=broken)


def crossing_board(run: Store, generation: int, holders: int, broken: Broken = str) -> Board:
    """The board of the crossing into a world, counted by holder; arguments as of :func:`world_board`.

    Where it begins is decided under the number ``generation``: ``give_up(generation, why)`` ends it before it has
    begun, for an agent, too, that sees a newcomer die. That it was committed stands until the next crossing clears the
    board: after a loss the leading agent has to know.
    """
    return Board(PrefixStore(f"crossing/{generation}", run), holders, broken=broken, lasting=(COMMIT,))


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
        alarm: rings when members are lost; None where that ends the run.
        folder: of the run, in which its agent is asked for things; None where it has none.
        attempt: number of the run's agent.
    """

    run: Store
    groups: Store
    member: int
    rank: int
    world_size: int
    generation: int = 0
    joins: bool = False
    alarm: Alarm | None = None
    folder: RunFolder | None = None
    attempt: int = 0

    @property
    def requests(self) -> Board:
        """The run's board."""
        return Board(self.run, self.world_size)

    def say_node(self, node: int) -> None:
        """Tell the other members on which node this one is: before it joins any of them."""
        self.requests.post(_node_key(self.member), str(node))

    def nodes(self, members: Iterable[int]) -> tuple[int, ...]:
        """The node of each of ``members``, who are of one world; empty where they have not said."""
        board = self.requests
        said = [board.peek(_node_key(member)) for member in members]
        return tuple(int(node) for node in said if node is not None) if None not in said else ()

    def board(self) -> Board:
        """The board of the world in which this process begins."""
        return self.world(self.generation, self.world_size)

    def world(self, generation: int, world_size: int) -> Board:
        """The board of one world, broken once one of its members is lost."""
        return world_board(self.run, generation, world_size, self._broken(generation))

    def crossing(self, generation: int, holders: int) -> Board:
        """The board of a crossing, broken once one of its holders is lost."""
        return crossing_board(self.run, generation, holders, self._broken(generation))

    def _broken(self, generation: int) -> Broken:
        alarm = self.alarm
        return lambda: alarm.words(generation) if alarm else ""


def _node_key(member: int) -> str:
    return f"node/{member}"
