"""Node 0's agent takes in agents that come while the run trains, or says why not."""

from collections.abc import Sequence

from dynatrain.cluster.claim import Admission, Claim, refusal
from dynatrain.cluster.door import Door
from dynatrain.cluster.hosts import Hosts
from dynatrain.cluster.meeting import Job, Meeting
from dynatrain.cluster.part import SUMMONS
from dynatrain.observe.log import Log
from dynatrain.observe.prints import print_of


class Admitting:
    """One look at the door at a time.

    Args:
        job: what is run; its prints are what an agent's code, config and model are held against.
        meeting: what the agents have in common.
        hosts: that there are; whoever is taken in becomes one of them.
        log: of events.
    """

    def __init__(self, job: Job, meeting: Meeting, hosts: Hosts, log: Log) -> None:
        self._job = job
        self._meeting = meeting
        self._hosts = hosts
        self._log = log
        self._door = Door(meeting.store, job.secret)

    def look(self, world: Sequence[int], generation: int) -> int:
        """Take in an agent that has come, if one has and may.

        Args:
            world: the members that there are, in the order of their ranks.
            generation: of that world.

        Returns:
            How many ranks it brings; 0 where nobody has come, or may come in.
        """
        claim = self._door.look()
        if claim is None:
            return 0
        if isinstance(claim, Claim):
            prints = {**self._job.prints, "config": print_of([self._job.run.config.read_bytes()])}
            why = refusal(claim, prints=prints, taken=self._hosts.taken, device=self._meeting.device)
            who = f"process {claim.pid} on {claim.host}"
        else:
            why, who = claim, "somebody"
        if why or not isinstance(claim, Claim):
            self._door.refuse(why)
            self._log.write("join_refused", who=who, reason=why)
            self._job.announce(f"Not admitted: {who}: {why}.")
            return 0
        node = self._hosts.admit(claim)
        self._door.admit(self._admission(node, world, generation))
        self._job.announce(f"Node {node} has joined: {who}.")
        return claim.ranks

    def _admission(self, node: int, world: Sequence[int], generation: int) -> Admission:
        return Admission(
            node=node,
            nodes=self._job.place.nodes,
            nonce=self._job.place.nonce,
            world_size=self._meeting.world_size,
            each=self._meeting.each,
            world=tuple(world),
            generation=generation,
            summons=self._meeting.board.peek(SUMMONS) or "",
            device=self._meeting.device,
            backend=self._meeting.backend,
            attempt=self._meeting.attempt,
        )
