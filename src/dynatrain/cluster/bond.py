"""What binds an agent to the one that leads: whether that is still there, and what the agent goes on with if not."""

from contextlib import suppress

from dynatrain.cluster.heart import read_beat
from dynatrain.cluster.meeting import Job, Meeting, RunFailedError
from dynatrain.cluster.part import Part
from dynatrain.cluster.peers import Peers
from dynatrain.cluster.place import PlaceError
from dynatrain.cluster.ranks import Ranks
from dynatrain.cluster.succession import Heir, heir_of
from dynatrain.cluster.tie import Tie
from dynatrain.observe.mark import MarkError

TIE_SECONDS = 0.5
"""For the news that the store is lost to come behind what follows from it."""


class Bond:
    """See the module's text. Empty where this agent hosts the store, and where the run ends with the agent that leads.

    Args:
        job: what is run.
        meeting: what the agents have in common.
        peers: the agents.
        part: this agent's in the changes of members.
        ranks: this node's.
    """

    def __init__(self, job: Job, meeting: Meeting, peers: Peers, part: Part, ranks: Ranks) -> None:
        self._job = job
        self._meeting = meeting
        self._peers = peers
        self._part = part
        self._ranks = ranks
        self._layout = job.layout  # that rank 0 has said last
        self._tie: Tie | None = None

    def tie(self) -> None:
        """Begin to watch the store.

        Raises:
            RunFailedError: it is not there.
        """
        place = self._job.place
        if self._job.take_up is None or place.hosts_store:
            return
        try:
            self._tie = Tie(place.host, place.port, self._job.liveness_seconds)
        except PlaceError as error:
            raise RunFailedError(str(error)) from error

    def look(self) -> None:
        """The store has answered; keep what it would be asked for no more."""
        self._layout = read_beat(self._meeting.board, self._part.world[0]).layout or self._layout
        if self._tie is not None:
            self._tie.answered()

    def lost(self) -> str:
        """What has become of the agent that leads, or of the store; empty where they are there. Waits a moment."""
        if self._tie is None:
            return ""
        if self._peers.handed_over:
            return "its host leaves the run"
        return self._tie.wait(TIE_SECONDS) or self._peers.silent(self._job.liveness_seconds).get(0, "")

    @property
    def is_over(self) -> bool:
        """Whether the agent that leads has said, in the run's folder, how the run has ended."""
        with suppress(OSError, MarkError):
            mark = self._job.run.agent()
            return mark is not None and mark.attempt == self._meeting.attempt and mark.exit is not None
        return False

    def heir(self) -> Heir:
        """What this agent goes on with, as long as its ranks are known."""
        assert self._tie is not None
        return heir_of(
            self._job,
            self._meeting,
            nodes=self._peers.staying,
            slots=tuple(self._ranks.slots[member] for member in self._part.kept),
            world_size=len(self._part.world),
            layout=self._layout,
            here=self._tie.here,
            handed=self._peers.handed_over,
        )

    def close(self) -> None:
        """Watch no more."""
        if self._tie is not None:
            self._tie.close()
