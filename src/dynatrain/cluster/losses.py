"""What the leading agent knows of losses: who is gone, what follows, and who is to come in their place."""

from collections.abc import Collection, Mapping

from dynatrain.cluster.heart import read_beat
from dynatrain.cluster.lost import aftermath
from dynatrain.cluster.meeting import Job, Meeting, RunFailedError
from dynatrain.cluster.peers import Peers
from dynatrain.cluster.summons import Newcomer, Summons
from dynatrain.cluster.worlds import COMMIT, crossing_board
from dynatrain.layout.text import parse_layout
from dynatrain.observe.requests import Answer, Request, new_id

MEND_SECONDS = 300.0
"""For what is left of a world to go on after a loss, files read from a slow disk included."""


class Losses:
    """See the module's text, and :mod:`dynatrain.cluster.lost` for the rules.

    Args:
        job: what is run.
        meeting: what the agents have in common.
        peers: the agents.
    """

    def __init__(self, job: Job, meeting: Meeting, peers: Peers) -> None:
        self._job = job
        self._meeting = meeting
        self._peers = peers
        self._gone: dict[int, str] = {}  # members, ever, and what has become of each
        self._replacements = job.replacements
        self._missing = 0  # members lost since the run had the layout
        self._full = job.layout

    def look(self, world: Collection[int], places: Mapping[int, Newcomer], mourned: Collection[int]) -> dict[int, str]:
        """Members of the world that are lost and not mourned yet, and what has become of each.

        Args:
            world: its members.
            places: of all members ever; those of a node go with its agent, which is no longer one of the run's.
            mourned: of whom the present summons is.
        """
        for node, why in self._peers.silent(self._job.liveness_seconds).items():
            self._peers.enroll(other for other in self._peers.nodes if other != node)
            self._gone |= {member: why for member, one in places.items() if one.node == node}
        for status in self._peers.everyone.values():
            self._gone |= dict(status.fallen)
        return {member: why for member, why in self._gone.items() if member in world and member not in mourned}

    def summons(self, world: tuple[int, ...], lost: Mapping[int, str], layout: str, generation: int) -> Summons:
        """What is left of ``world`` is summoned; ``lost`` are those that nobody has mourned yet.

        Raises:
            RunFailedError: nobody can go on.
        """
        if early := [member for member in world if not read_beat(self._meeting.board, member).layout]:
            raise RunFailedError(f"{'; '.join(lost.values())}; members {early} were not ready for their first step")
        try:
            found = aftermath(
                world,
                {member: self._gone[member] for member in world if member in self._gone},
                generation=generation,
                layout=lambda size: self._job.resize(layout, size, ""),
            )
        except ValueError as error:
            raise RunFailedError(str(error)) from error
        self._full = self._full if self._missing else layout
        self._missing += len(lost)
        return found

    def cut_short(self, summons: Summons, why: str) -> bool:
        """Give a crossing up into which a loss has fallen; whether the ranks had committed it before."""
        board = crossing_board(self._meeting.run, summons.generation, summons.holders)
        board.give_up(summons.generation, why)
        return "abort" not in board.decide(COMMIT, {"abort": why})

    def outcome(self, loss: Summons) -> Answer | None:
        """What has become of the crossing after a loss, of which nobody was asked; None while that is open."""
        found = crossing_board(self._meeting.run, loss.generation, loss.holders).decided(COMMIT)
        if found is None:
            return None
        return Answer(outcome="aborted" if "abort" in found else "done", message=found.get("abort", ""))

    def crossed(self, summons: Summons) -> None:
        """A crossing is done: where somebody has asked for it, the run has the size that is wanted."""
        self._missing = self._missing if summons.lost else 0

    def replacement(self) -> Request | None:
        """The request for the layout before, once for all losses since; None where no replacements are left."""
        if self._replacements < self._missing:
            return None
        self._replacements -= self._missing
        self._missing = 0
        arguments = {"size": parse_layout(self._full).world_size, "layout": self._full}
        return Request(id=new_id(), verb="scale", arguments=arguments, by="loss")
