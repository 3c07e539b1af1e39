"""One agent's part in the changes of the world's members: it starts its newcomers and sees that its leavers go.

It keeps the spares of its node, too, and calls those who are newcomers.
"""

from collections.abc import Callable, Iterable, Sequence

from torch.distributed import Store

from dynatrain.cluster.board import Board
from dynatrain.cluster.causes import say_end
from dynatrain.cluster.context import RankContext
from dynatrain.cluster.heart import Pulse
from dynatrain.cluster.ranks import Ranks
from dynatrain.cluster.reserve import read_spares
from dynatrain.cluster.seat import call
from dynatrain.cluster.summons import Newcomer, Summons
from dynatrain.cluster.worlds import crossing_board
from dynatrain.observe.log import Log

SUMMONS = "summons"
"""Where on the run's board the summons stands."""


class Part:
    """Follows the summons on one node.

    Args:
        store: the run's.
        ranks: this node's.
        pulse: their beats.
        told: ``(newcomers, world, generation)`` to what those of them are told that come to this node; spares' world is
            empty.
        log: of events.
        patience: seconds without a beat after which a newcomer is lost.
        leave_seconds: what leavers have to end by themselves.
        world: members of the world, by rank.
        summons: the last one before this agent came in, in which it has no part.

    Attributes:
        world: members, by rank.
        summons: the last one; None before the first.
        heard: its mark, once it was acted on.
        lost: newcomers of this node that cannot take part, in words.
    """

    def __init__(
        self,
        store: Store,
        ranks: Ranks,
        pulse: Pulse,
        told: Callable[[Iterable[Newcomer], Sequence[int], int], list[RankContext]],
        log: Log,
        *,
        patience: float,
        leave_seconds: float,
        world: tuple[int, ...],
        summons: Summons | None = None,
    ) -> None:
        self._store = store
        self._board = Board(store, len(world))
        self._ranks = ranks
        self._pulse = pulse
        self._told = told
        self._log = log
        self._patience = patience
        self._leave_seconds = leave_seconds
        self._since = 0.0
        self._overdue: set[int] = set()
        self._spares: set[int] = set()
        self.world = world
        self.summons = summons
        self.heard = summons.mark if summons else ""
        self.lost = ""

    @property
    def members(self) -> tuple[int, ...]:
        """Members of the world on this node, by rank."""
        return tuple(member for member in self.world if member in self._ranks)

    @property
    def kept(self) -> tuple[int, ...]:
        """Members of the world on this node, and its spares."""
        return (*self.members, *sorted(self._spares))

    @property
    def bound(self) -> tuple[int, ...]:
        """Those whose end the run answers for: while the ranks are asked, a leaver may have left already."""
        asked = self.summons is not None and self.summons.stage == "asked"
        leavers = self.summons.leavers if asked and self.summons else ()
        return tuple(member for member in self.members if member not in leavers)

    def look(self, now: float) -> None:
        """Follow the summons, and see to the spares."""
        spares = read_spares(
            self._board
        )  # before the summons, which is written before those it calls are left out here
        text = self._board.peek(SUMMONS)
        if text is not None:
            summons = Summons.from_json(text)
            if summons != self.summons:
                self.summons, self._since = summons, now
                self._begin(summons)
            self._go_on(summons, now)
        self._keep_spares(spares)

    def _keep_spares(self, wanted: Sequence[Newcomer]) -> None:
        """Start those that are new on this node, and end those that nobody wants any more."""
        self._spares.update(self._fork(self._told([one for one in wanted if one.member not in self._ranks], (), 0)))
        unwanted = self._spares - {one.member for one in wanted}
        self._ranks.kill(unwanted & set(self._ranks.living))
        self._spares -= unwanted

    def _fork(self, contexts: Sequence[RankContext]) -> list[int]:
        self._ranks.fork(contexts)
        return [context.member for context in contexts]

    def name(self, member: int) -> str:
        """A member as people know it: by its rank, where it has one, and its process."""
        about = [f"process {self._ranks.pids.get(member, 0)}"]
        if member in self._ranks.halted:
            about.append("halted")
        if member not in self.world:
            return f"member {member} ({', '.join(about)})"
        rank = self.world.index(member)
        return f"rank {rank} ({', '.join(about if rank == member else [f'member {member}', *about])})"

    def _begin(self, summons: Summons) -> None:
        """Do at once what a stage asks for."""
        if summons.lost:
            self._begin_anew(summons)
        if summons.stage == "coming":
            self.lost = ""
            told = self._told(summons.newcomers, summons.new, summons.generation)
            self._fork([context for context in told if context.member not in self._ranks])
            for context in told:
                if context.member in self._spares:
                    self._spares.remove(context.member)
                    call(self._board, context)
            self._pulse.watch(self._here(summons.coming))
        elif summons.stage == "done":
            self.world = summons.new
            self._log.enter(summons.generation)
        self._pulse.forget(summons.going)
        if summons.stage == "undone":
            self._ranks.kill(self._here(summons.coming))
        self.heard = summons.mark

    def _begin_anew(self, summons: Summons) -> None:
        """After a loss: how the crossing before has come out, this agent need not have heard, nor of this one's stages.

        Who is in neither world, or is taken for lost and lives, is ended: it would train on beside the others.
        """
        self.world = summons.old
        strangers = {*self._ranks.living} - {*summons.survivors, *summons.coming, *self._spares}
        self._pulse.forget(strangers | {*summons.lost})
        self._ranks.kill(strangers)

    def _go_on(self, summons: Summons, now: float) -> None:
        """Do what a stage asks for in time."""
        if summons.is_open and not self.lost:
            self.lost = self._lost(summons)
        if summons.stage == "asked" and self.lost and not summons.lost:
            crossing = crossing_board(self._store, summons.generation, summons.holders)
            crossing.give_up(summons.generation, self.lost)
        if summons.stage == "done" and now - self._since > self._leave_seconds:
            self._kill_overdue(self._here(summons.leavers))

    def _lost(self, summons: Summons) -> str:
        silent = self._pulse.silent(self._patience)
        for member in self._here(summons.coming):
            if (end := self._ranks.ends.get(member)) is not None:
                return f"{self.name(member)} {say_end(end)} before it had joined"
            if member in silent:
                return f"no sign of life for {self._patience:g} s from {self.name(member)}, which had not joined"
        return ""

    def _kill_overdue(self, leavers: Iterable[int]) -> None:
        late = [member for member in leavers if member in self._ranks.living and member not in self._overdue]
        for member in late:
            pid = self._ranks.pids.get(member, 0)
            self._log.write("overdue", member=member, pid=pid, seconds=self._leave_seconds)
        self._overdue.update(late)
        self._ranks.kill(late)

    def _here(self, members: Iterable[int]) -> tuple[int, ...]:
        return tuple(member for member in members if member in self._ranks)
