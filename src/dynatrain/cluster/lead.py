"""Node 0's agent leads the run through changes of its members, one at a time; later requests wait."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dynatrain.cluster.desk import Desk
from dynatrain.cluster.heart import read_beat
from dynatrain.cluster.lent import Loan, Spot, require_fewer, spots_text
from dynatrain.cluster.meeting import Job, Meeting, first_world
from dynatrain.cluster.membership import MembershipError, next_world
from dynatrain.cluster.part import SUMMONS
from dynatrain.cluster.peers import Peers
from dynatrain.cluster.summons import Newcomer, Sight, Summons, advance, is_over
from dynatrain.cluster.worlds import crossing_board
from dynatrain.layout.text import parse_layout
from dynatrain.observe.log import Log
from dynatrain.observe.requests import Answer, Request


class Lead:
    """See the module's text, and :mod:`dynatrain.cluster.summons` for the rules.

    Args:
        job: what is run.
        meeting: what the agents have in common.
        desk: where the requests are.
        peers: the agents.
        log: of events.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        job: Job,
        meeting: Meeting,
        desk: Desk,
        peers: Peers,
        log: Log,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._meeting = meeting
        self._desk = desk
        self._peers = peers
        self._log = log
        self._clock = clock
        self._places = {one.member: one for one in first_world(job, meeting)}  # of all members ever
        self._world = tuple(self._places)
        self._layout = job.layout
        self._said_layout = ""
        self._before = job.layout  # when the crossing that is open began: rank 0 may say the next one before its end
        self._generation = 0  # the last one that a crossing had
        self._loan = Loan()
        self._summons: Summons | None = None
        self._request = Request(id="none", verb="stop")  # of the summons
        self._number = -1  # of what was asked of the ranks
        self._since = 0.0

    def look(self, *, stopping: bool) -> None:
        """Go as far as can be gone.

        Args:
            stopping: the run was asked to stop: no crossing begins, one that has not begun is given up.
        """
        self._look_at_layout()
        if self._summons is not None:
            self._follow(self._summons, stopping=stopping)
        elif not stopping and (request := self._desk.next_scale()) is not None:
            if request.deadline is not None and request.deadline < time.time():
                late = Answer(outcome="refused", message="its deadline passed while others were carried out; ask again")
                self._desk.answer(request, late)
            else:
                self._begin(request)

    def _look_at_layout(self) -> None:
        """The present layout: what rank 0 has said last, or what a crossing has made of it since."""
        said = read_beat(self._meeting.board, self._world[0]).layout
        if said and said != self._said_layout:
            self._said_layout = self._layout = said

    def _begin(self, request: Request) -> None:
        """Summon who is to come, or answer at once."""
        wanted, size = request.arguments, len(self._world)
        named = str(wanted.get("layout", ""))
        ranks: list[int] = wanted.get("leave", [])
        try:
            to = int(wanted.get("size") or (parse_layout(named).world_size if named else size - len(set(ranks))))
            if request.verb == "lend":
                require_fewer(size, to, len(set(ranks)))
            elif request.verb == "reclaim":
                to, named = size + len(self._loan.spots), named or self._loan.layout_back(self._layout)
            if to != size or ranks:
                self._request = request
                self._enter(self._summons_to(to, named, ranks, str(wanted.get("mode", ""))))
            elif request.verb == "reclaim":
                self._desk.answer(request, Answer(outcome="unchanged", message="nothing is lent"))
            elif named and request.verb == "scale":
                mode = {"mode": wanted["mode"]} if "mode" in wanted else {}
                self._desk.publish(replace(request, verb="switch", arguments={"layout": named, **mode}))
            else:
                self._desk.answer(request, Answer(outcome="unchanged", message=f"the run has {size} ranks already"))
        except ValueError as error:
            self._desk.answer(request, Answer(outcome="refused", message=str(error)))

    def _summons_to(self, size: int, named: str, ranks: Sequence[int], mode: str) -> Summons:
        """The crossing to ``size`` ranks.

        Raises:
            ValueError: there is no such world.
        """
        if unknown := [rank for rank in ranks if rank >= len(self._world)]:
            raise MembershipError(f"there are no ranks {unknown}; the run has 0 to {len(self._world) - 1}")
        free = self._free(size)
        chosen = next_world(
            self._world,
            {member: one.node for member, one in self._places.items()},
            size=size,
            leave={self._world[rank] for rank in ranks},
            free={node: len(slots) for node, slots in free.items()},
            first=len(self._places),
        )
        return Summons(
            generation=self._generation + 1,
            old=self._world,
            new=chosen.new,
            newcomers=tuple(Newcomer(member=m, node=n, slot=free[n].pop(0)) for m, n in chosen.newcomers.items()),
            layout=self._job.resize(self._layout, size, named),
            mode=mode,
        )

    def _free(self, most: int) -> dict[int, list[int]]:
        """Free places of each node, at most ``most``: one rank a device, on CPUs as many as are wanted."""
        taken = {self._spot(member) for member in {*self._world, *self._living()}}
        if self._request.verb == "reclaim":
            return self._loan.alone(taken)
        taken |= {*self._loan.spots}
        free = {}
        for node in range(self._job.place.nodes):
            there = {slot for at, slot in taken if at == node}
            last = self._meeting.devices[node] if self._meeting.device == "cuda" else len(there) + most
            free[node] = [slot for slot in range(last) if slot not in there]
        return free

    def _spot(self, member: int) -> Spot:
        return self._places[member].node, self._places[member].slot

    def _living(self) -> set[int]:
        return {member for status in self._peers.everyone.values() for member in status.living}

    def _follow(self, summons: Summons, *, stopping: bool) -> None:
        sight = self._sight(summons, stopping=stopping)
        if stopping and self._number >= 0 and summons.stage == "asked":
            crossing_board(self._meeting.run, summons.generation, summons.holders).give_up(
                summons.generation, "the run is stopping"
            )
        following = advance(summons, sight)
        if following != summons:
            self._enter(following)
        elif summons.stage == "asked" and self._number < 0 and set(sight.heard.values()) == {summons.mark}:
            self._number = self._desk.ask(self._request, summons.arguments)
        elif is_over(summons, sight, self._job.leave_seconds):
            self._settle(summons, stuck=sorted(set(summons.going) & set(sight.living)))

    def _sight(self, summons: Summons, *, stopping: bool) -> Sight:
        statuses = self._peers.everyone
        absent: tuple[int, ...] = ()
        if summons.stage == "coming":
            absent = tuple(m for m in summons.coming if not read_beat(self._meeting.board, m).number)
        return Sight(
            waited=self._clock() - self._since,
            absent=absent,
            lost=[said.lost for said in statuses.values() if said.lost and said.heard == summons.mark],
            living=self._living(),
            heard={node: status.heard for node, status in statuses.items()},
            stopping=stopping,
            published=self._number >= 0,
            answer=self._desk.heard(self._number) if self._number >= 0 else None,
        )

    def _enter(self, summons: Summons) -> None:
        """Tell everybody of a stage."""
        self._summons, self._since = summons, self._clock()
        if summons.stage == "coming":
            self._generation, self._before = summons.generation, self._layout
            self._places |= {one.member: one for one in summons.newcomers}
        elif summons.stage == "done":
            self._note_loan(summons)
            self._world, self._layout = summons.new, summons.layout
        self._meeting.board.post(SUMMONS, summons.to_json())
        self._log.write(
            "crossing",
            id=self._request.id,
            world=summons.generation,
            stage=summons.stage,
            members=list(summons.new),
            newcomers=list(summons.coming),
            leavers=list(summons.leavers),
            layout=summons.layout,
            reason=summons.reason,
        )

    def _note_loan(self, summons: Summons) -> None:
        """Keep places for who lent them, or have them back."""
        if self._request.verb == "lend":
            spots = [self._spot(member) for member in summons.leavers]
            self._loan = self._loan.lend(spots, self._before, summons.layout)
        elif self._request.verb == "reclaim":
            self._loan = Loan()
        else:
            return
        self._log.write("lent", id=self._request.id, places=self._loan.words(self._meeting.device))

    def end(self) -> None:
        """The run has ended: a crossing that is open is over with it, and whoever asked hears of that."""
        if self._summons is None:
            return
        sight = replace(self._sight(self._summons, stopping=True), living=())
        if (following := advance(self._summons, sight)) != self._summons:
            self._enter(following)
        self._settle(following)

    def _settle(self, summons: Summons, stuck: Sequence[int] = ()) -> None:
        """Answer whoever asked; the next one may come.

        Args:
            summons: as it has come out.
            stuck: members that were killed and are not gone.
        """
        heard = self._desk.heard(self._number) if self._number >= 0 else None
        answer = heard or Answer(outcome="aborted", message=summons.reason)
        if self._request.verb == "lend" and answer.outcome == "done":
            gone = [self._spot(member) for member in summons.leavers if member not in stuck]
            free = spots_text(gone, self._meeting.device) or "none yet"
            answer = replace(answer, message=f"{answer.message}; free, and kept until they are reclaimed: {free}")
        if stuck:
            answer = replace(answer, message=f"{answer.message}; killed and not gone: members {stuck}")
        self._desk.answer(self._request, answer)
        self._summons, self._number = None, -1
