"""Whether a run can go on, and whether it is over, as far as one node sees."""

from collections.abc import Callable
from pathlib import Path

from dynatrain.cluster.causes import SAVED, ended_badly, first_cause, names, say_end
from dynatrain.cluster.context import Report
from dynatrain.cluster.heart import Pulse
from dynatrain.cluster.lost import is_lost
from dynatrain.cluster.part import Part
from dynatrain.cluster.peers import Peers
from dynatrain.cluster.ranks import Ranks

SETTLE_SECONDS = 0.3  # from the first bad end until the cause is named
STACK_SECONDS = 0.4  # for ranks to print their stacks


class Vitals:
    """Judges the ends and the silence of this node's ranks, and what other agents say.

    Args:
        ranks: this node's.
        pulse: their beats.
        part: who of them is in the world.
        peers: the other agents.
        patience: seconds without a sign of life after which somebody is lost.
        pause: sleeps for some seconds.
        logs: the folder in which ranks print their stacks.
        survives: whether the run can go on without members that are lost.

    Attributes:
        fallen: members of this node that are lost, and what has become of each; what has become of the run then is for
            the leading agent to say.
    """

    def __init__(
        self,
        ranks: Ranks,
        pulse: Pulse,
        part: Part,
        peers: Peers,
        *,
        patience: float,
        pause: Callable[[float], None],
        logs: Path,
        survives: bool = False,
    ) -> None:
        self._ranks = ranks
        self._pulse = pulse
        self._part = part
        self._peers = peers
        self._patience = patience
        self._pause = pause
        self._logs = logs
        self._survives = survives
        self.fallen: dict[int, str] = {}
        self._first_bad = 0.0  # when the first rank failed, and when the first one ended well; 0 while none has
        self._first_good = 0.0

    def failure(self, now: float, *, stopping: bool) -> str:
        """Why the run cannot go on; empty where it can.

        Args:
            now: seconds, monotonic.
            stopping: the ranks were asked to end, and have a time set to do so.
        """
        if trouble := self._peers.failure(self._patience, survives=self._survives):
            return trouble
        if stopping and self._peers.any_done():
            return ""  # what ends now may end because another node has killed its ranks
        if self._survives and not stopping:
            self._note_fallen()
        bound = tuple(member for member in self._part.bound if member not in self.fallen)
        living = [member for member in bound if member in self._ranks.living]
        if any(end.member in bound and ended_badly(end) for end in self._ends()):
            self._first_bad = self._first_bad or now
            return self._cause() if now - self._first_bad >= SETTLE_SECONDS or not living else ""
        return "" if stopping else self._silence(living) or self._lateness(now, bound, living)

    def _note_fallen(self) -> None:
        """Take in who is lost. One that is silent is killed: it could come back, and train on beside the others.

        A leaver, too, while its crossing is not decided: the others wait for it in their step. Where it had left, the
        agent that leads sees that.
        """
        for end in self._ends():
            if end.member not in self.fallen and is_lost(end):
                self.fallen[end.member] = self._say(end)
        here = [one for one in self._part.members if one in self._ranks.living and one not in self.fallen]
        if said := self._silence(here):
            silent = [member for member in self._pulse.silent(self._patience) if member in here]
            self.fallen |= dict.fromkeys(silent, said)
            self._ranks.kill(silent)

    def _cause(self) -> str:
        """The first bad end; it may be that of a leaver, which alone would not have mattered."""
        bad = [end for end in self._ends() if ended_badly(end)]
        said = self._say(first_cause([end for end in bad if end.member not in self.fallen] or bad))
        lost = "; ".join(self.fallen.values())
        return f"{lost}; then {said}" if lost and lost not in said else said

    def _say(self, end: Report) -> str:
        return f"{self._part.name(end.member)} {say_end(end)}, in {self._pulse.last(end.member)}"

    def _silence(self, living: list[int]) -> str:
        silent = [member for member in self._pulse.silent(self._patience) if member in living]
        if not silent:
            return ""
        self._ranks.print_stacks()
        self._pause(STACK_SECONDS)
        said = "; ".join(f"{self._part.name(one)}, last seen in {self._pulse.last(one)}" for one in silent)
        return f"no sign of life for {self._patience:g} s from {said}. The stacks are in {self._logs}"

    def _lateness(self, now: float, bound: tuple[int, ...], living: list[int]) -> str:
        """Whether some have ended well and others do not."""
        if len(living) == len(bound) and not self._peers.any_done():
            self._first_good = 0.0
            return ""
        self._first_good = self._first_good or now
        if not living or now - self._first_good <= self._patience:
            return ""
        late = names(map(self._part.world.index, living))
        return f"{late} did not end within {self._patience:g} s of the others"

    def over(self) -> bool:
        """Whether the run is over on this node; one that has no ranks at the moment waits for the others."""
        summons = self._part.summons
        members = tuple(member for member in self._part.members if member not in self.fallen)
        undecided = summons is not None and summons.stage == "asked"
        ended = not set(members) & set(self._ranks.living) and not undecided
        return ended and (bool(members) or self._peers.any_done())

    @property
    def ended_well(self) -> bool:
        """Whether all members of this node, at least one, have ended, and none badly."""
        ends = self._ends()
        return bool(ends) and len(ends) == len(self._part.members) and not any(map(ended_badly, ends))

    def code(self) -> int:
        """:data:`SAVED` where the ranks say that they have stopped saved; else 0."""
        if not self._part.members:
            return self._peers.code
        return SAVED if any(end.code == SAVED for end in self._ends()) else 0

    def _ends(self) -> list[Report]:
        """How members of the world have ended on this node."""
        return [self._ranks.ends[member] for member in self._part.members if member in self._ranks.ends]
