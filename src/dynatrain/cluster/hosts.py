"""The hosts of a run as the agent that leads it sees them: which were told to leave, which are let go."""

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from dynatrain.cluster.claim import Claim
from dynatrain.cluster.meeting import Host, Job, Meeting
from dynatrain.cluster.membership import MembershipError
from dynatrain.cluster.parting import verdict
from dynatrain.cluster.peers import Peers
from dynatrain.cluster.summons import GONE_SECONDS
from dynatrain.observe.log import Log
from dynatrain.observe.requests import Answer


class Hosts:
    """See the module's text, and :mod:`dynatrain.cluster.parting` for the rules.

    A host is freed of ranks by a crossing like any other. Then its agent is struck off the roster, sees that, and ends.

    Args:
        job: what is run.
        meeting: what the first agents have in common.
        peers: the agents.
        log: of events.
        clock: seconds, monotonic.

    Attributes:
        devices: CUDA devices of each node.
        going: hosts that the open change is to free of ranks, or that are let go.
    """

    def __init__(
        self, job: Job, meeting: Meeting, peers: Peers, log: Log, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._job = job
        self._hosts = dict(meeting.hosts)  # of every node that ever was
        self.devices = dict(meeting.devices)
        self._peers = peers
        self._log = log
        self._clock = clock
        self._told: dict[int, float] = {}  # when a signal told a host to leave, as far as it has not left
        self._farewell: Answer | None = None
        self._since = 0.0  # of the farewell
        self.going: tuple[int, ...] = ()

    def hear(self) -> None:
        """See which hosts a signal has told to leave."""
        for node, status in self._peers.everyone.items():
            if status.state == "leaving" and node not in self._told:
                self._told[node] = self._clock()
                self._log.write("host_leaves", node=node, seconds=self._job.drain_seconds)

    @property
    def overdue(self) -> str:
        """Why the run is to stop: some have had their time; empty where none has."""
        if self._verdict() != "stop":
            return ""
        half = self._job.drain_seconds / 2
        return f"nodes {self._late} have not handed over within {half:g} s, half of world.grace"

    @property
    def due(self) -> tuple[int, ...]:
        """Hosts that are to leave now because a signal has told them so."""
        return tuple(self._late) if self._verdict() == "go" else ()

    @property
    def signalled(self) -> bool:
        """Whether a signal has told some host to leave that is still there."""
        return bool(self._late)

    @property
    def open(self) -> tuple[int, ...]:
        """Nodes that newcomers may come to."""
        return tuple(node for node in self._peers.nodes if node not in self.going and node not in self._told)

    @property
    def _late(self) -> list[int]:
        return [node for node in self._told if node in self._peers.nodes]

    def _verdict(self) -> str:
        waits = [self._clock() - self._told[node] for node in self._late]
        return verdict(waits, self._job.drain_seconds) if waits else "wait"

    @property
    def taken(self) -> dict[str, str]:
        """Who has which place, in words."""
        return {host.place: str(host) for node, host in self._hosts.items() if node in self._peers.nodes}

    def admit(self, claim: Claim) -> int:
        """Take an agent in; the number of its node, which none has had before."""
        node = max(self.devices) + 1
        self._hosts[node] = Host(place=claim.place, name=claim.host, pid=claim.pid, devices=claim.devices)
        self.devices[node] = claim.devices
        self._peers.enroll({*self._peers.nodes, node})
        self._log.write("host_joined", node=node, host=claim.host, place=claim.place, pid=claim.pid)
        return node

    def strike(self, used: Collection[int]) -> None:
        """Go on without those agents that are lost and have no ranks: a run depends on its ranks alone.

        Args:
            used: nodes that have ranks, or are about to.
        """
        spared = {*used, *self.going, self._job.place.node}
        half = self._job.liveness_seconds / 2  # before the other agents take its silence for a failure
        lost = [node for node in self._peers.nodes if node not in spared and self._peers.is_lost(node, half)]
        if lost:
            self._peers.enroll(set(self._peers.nodes) - set(lost))
        for node in lost:
            self._told.pop(node, None)
            self._log.write("host_left", node=node)

    @property
    def lead(self) -> int:
        """The node of the agent that leads."""
        return self._job.place.node

    def begin(self, nodes: Collection[int]) -> None:
        """These are to leave.

        Raises:
            MembershipError: they cannot.
        """
        lead = self.lead
        if lead in nodes:
            raise MembershipError(
                f"node {lead} leads the run and holds its store: it is not drained while the run goes on. Nearest: "
                "SIGTERM to its agent; dynatrain stop, which saves; or dynatrain drain --rank, which frees it of ranks"
            )
        if unknown := [node for node in nodes if node not in self._peers.nodes]:
            raise MembershipError(f"there are no nodes {unknown}; the run has nodes {list(self._peers.nodes)}")
        self.going = tuple(sorted(set(nodes)))

    def stay(self) -> None:
        """What was to free them has come to nothing."""
        self.going = ()

    def let_go(self, answer: Answer) -> None:
        """They have no ranks any more: their agents may end.

        Args:
            answer: for whoever asked, once they have.
        """
        self._peers.enroll(set(self._peers.nodes) - set(self.going))
        self._farewell, self._since = answer, self._clock()

    @property
    def departing(self) -> bool:
        """Whether some are let go that have not ended yet."""
        return self._farewell is not None

    def see_off(self, *, at_once: bool = False) -> Answer | None:
        """The answer for whoever asked, once the agents have ended, or do not say so in time.

        Args:
            at_once: wait no longer: the run ends.
        """
        if self._farewell is None:
            return None
        there = [node for node in self.going if getattr(self._peers.status(node), "state", "") != "left"]
        waited = self._clock() - self._since
        if there and not at_once and waited < self._job.leave_seconds + GONE_SECONDS:
            return None
        for node in self.going:
            self._told.pop(node, None)
            self._log.write("host_left", node=node)
        gone = f"gone: nodes {list(self.going)}" + (f"; not heard of since: nodes {there}" if there else "")
        answer = replace(self._farewell, message="; ".join(filter(None, (self._farewell.message, gone))))
        self._farewell, self.going = None, ()
        return answer
