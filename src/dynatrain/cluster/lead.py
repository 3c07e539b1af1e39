"""Node 0's agent leads the run through changes of its members and hosts, one at a time; later requests wait."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dynatrain.cluster.admitting import Admitting
from dynatrain.cluster.alarm import put_up
from dynatrain.cluster.desk import Desk
from dynatrain.cluster.heart import read_beat
from dynatrain.cluster.hosts import Hosts
from dynatrain.cluster.lent import Loans, Spot
from dynatrain.cluster.losses import MEND_SECONDS, Losses
from dynatrain.cluster.meeting import Job, Meeting, RunFailedError
from dynatrain.cluster.membership import MembershipError, next_world
from dynatrain.cluster.part import SUMMONS
from dynatrain.cluster.parting import largest
from dynatrain.cluster.peers import Peers
from dynatrain.cluster.reserve import Reserve
from dynatrain.cluster.summons import Newcomer, Sight, Summons, advance, is_over
from dynatrain.cluster.worlds import crossing_board
from dynatrain.layout.text import parse_layout
from dynatrain.observe.log import Log
from dynatrain.observe.requests import Answer, Request, new_id


class Lead:
    """See the module's text, and :mod:`dynatrain.cluster.summons` for the rules.

    Args:
        job: what is run.
        meeting: what the agents have in common.
        desk: where the requests are.
        peers: the agents.
        log: of events.
        clock: seconds, monotonic.

    Attributes:
        must_stop: why the run is to stop saved: a host has to go, and the others cannot go on; empty where none has.
        hands_over: whether this host is to go, and the others go on under another lead.
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
        self._places = {one.member: one for one in meeting.seats}  # of all members ever
        self._world = tuple(self._places)
        self._layout = job.layout
        self._said_layout = ""
        self._generation = 0  # the last one that a crossing had
        self._loans = Loans(meeting.device)
        self._in_generation = 0  # of the world that there is
        self._summons: Summons | None = None
        self._losses = Losses(job, meeting, peers)
        self._request = Request(id="none", verb="stop")  # of the summons
        self._number = -1  # of what was asked of the ranks
        self._since = 0.0
        self._hosts = Hosts(job, meeting, peers, log, clock)
        self._admitting = Admitting(job, meeting, self._hosts, log)
        self._reserve = Reserve(meeting.board, job.spares)
        self.must_stop = ""
        self.hands_over = False

    def look(self, *, stopping: bool) -> None:
        """Go as far as can be gone.

        Args:
            stopping: the run was asked to stop: no change begins, a crossing that has not begun is given up.
        """
        self._look_at_layout()
        if self._job.survives and not stopping:
            mourned = self._summons.lost if self._summons is not None else ()
            if lost := self._losses.look(self._world, self._places, mourned):
                self._lose(lost)
        self._hosts.hear()
        coming = self._summons.newcomers if self._summons is not None else ()
        self._hosts.strike({*(self._places[member].node for member in self._world), *(one.node for one in coming)})
        if self._summons is None or self._summons.stage != "done":
            self._give_up(self._hosts.overdue)
        if self._summons is not None:
            self._follow(self._summons, stopping=stopping)
        elif self._hosts.departing:
            if (answer := self._hosts.see_off()) is not None:
                self._answer(answer)
        elif not stopping and not self.must_stop:
            self._keep_spares()
            self._take_up()
            if self._summons is None and not self._hosts.departing:
                self._grow(self._admitting.look(self._world, self._in_generation))

    def _grow(self, ranks: int) -> None:
        """Ask for the largest world that there may be with so many more ranks, if any are brought."""
        if not ranks:
            return
        size, _ = largest(len(self._world) + ranks, lambda size: self._job.resize(self._layout, size, ""))
        request = Request(id=new_id(), verb="scale", arguments={"size": max(size, len(self._world))}, by="join")
        self._desk.note(request)
        self._begin(request)

    def _keep_spares(self) -> None:
        new = self._reserve.keep(self._living(), self._hosts.open, self._free(self._job.spares), len(self._places))
        self._places |= {one.member: one for one in new}

    def _take_up(self) -> None:
        """Begin what comes next: hosts that a signal tells to leave go before what people ask for."""
        if self._hosts.signalled:
            if self._hosts.lead in (nodes := self._hosts.due):
                self._hand_over(nodes)
            elif nodes:
                request = Request(id=new_id(), verb="scale", arguments={"nodes": list(nodes)}, by="SIGTERM")
                self._desk.note(request)
                self._begin(request)
        elif (request := self._desk.next_scale()) is not None:
            if request.deadline is not None and request.deadline < time.time():
                late = Answer(outcome="refused", message="its deadline passed while others were carried out; ask again")
                self._desk.answer(request, late)
            else:
                self._begin(request)

    def _hand_over(self, nodes: Sequence[int]) -> None:
        """This host goes, as others may: the rest goes on without, if there is a layout for the ranks that stay."""
        stay = [node for node in self._hosts.open if node not in nodes]
        spares = sum(map(len, self._reserve.ready(stay).values()))
        ranks = sum(self._places[member].node in stay for member in self._world) + spares
        try:
            largest(min(ranks, len(self._world)), lambda size: self._job.resize(self._layout, size, ""))
        except ValueError as error:
            self._give_up(f"the hosts that were told to go cannot leave: {error}")
        else:
            self.hands_over = True

    def _give_up(self, why: str) -> None:
        """The run is to stop while all of it is there; nothing where ``why`` is empty."""
        self.must_stop = self.must_stop or why

    def _look_at_layout(self) -> None:
        """The present layout: what rank 0 has said last, or what a crossing has made of it since."""
        said = read_beat(self._meeting.board, self._world[0]).layout
        if said and said != self._said_layout:
            self._said_layout = self._layout = said

    def _lose(self, lost: dict[int, str]) -> None:
        """Summon who is left.

        Raises:
            RunFailedError: nobody can go on.
        """
        if self._summons is not None:
            self._cut_short(self._summons, "; ".join(lost.values()))
        if not {*self._world} & {*lost}:
            return  # it had left, or not come
        others = {*self._world} - {*lost}
        if self._summons is None and others and not others & self._living():
            return  # they have ended behind their last step, where nobody needs it any more
        summons = self._losses.summons(self._world, lost, self._layout, self._generation + 1)
        self._request, self._number = Request(id=f"loss-{summons.generation}", verb="stop"), -1
        self._generation = summons.generation
        put_up(self._meeting.run, summons)
        self._enter(summons)
        self._job.announce(f"{summons.why}. Going on with {len(summons.new)} ranks in {summons.layout}.")

    def _cut_short(self, summons: Summons, why: str) -> None:
        """A crossing into which a loss has fallen: whether it stands is decided now, if it was not before."""
        committed = self._losses.cut_short(summons, why)
        if self._number >= 0:  # else whoever is rank 0 next would take up what the one before was asked
            told = Answer(outcome="done" if committed else "aborted", message=why)
            self._meeting.board.answer(self._number, told.to_json())
            self._desk.serve()
        if summons.stage in {"coming", "asked"}:
            self._enter(summons.at("done") if committed else summons.at("undone", why))
        self._settle(summons)

    def _begin(self, request: Request) -> None:
        """Summon who is to come, or answer at once."""
        self._request = request
        try:
            if nodes := request.arguments.get("nodes", []):
                self._begin_parting(nodes, str(request.arguments.get("layout", "")))
            else:
                self._begin_change(request)
        except ValueError as error:
            self._hosts.stay()
            self._answer(Answer(outcome="refused", message=str(error)))

    def _begin_change(self, request: Request) -> None:
        """Another number of ranks, or some of them named.

        Raises:
            ValueError: there is no such world.
        """
        wanted, size = request.arguments, len(self._world)
        named = str(wanted.get("layout", ""))
        ranks: list[int] = wanted.get("leave", [])
        to = int(wanted.get("size") or (parse_layout(named).world_size if named else size - len(set(ranks))))
        to, named = self._loans.asked(request, (size, to), named, self._layout, self._hosts.open)
        if to != size or ranks:
            self._enter(self._summons_to(to, named, ranks, str(wanted.get("mode", ""))))
        elif named and request.verb == "scale":
            mode = {"mode": wanted["mode"]} if "mode" in wanted else {}
            self._desk.publish(replace(request, verb="switch", arguments={"layout": named, **mode}))
        else:
            same = "nothing is lent" if request.verb == "reclaim" else f"the run has {size} ranks already"
            self._desk.answer(request, Answer(outcome="unchanged", message=same))

    def _begin_parting(self, nodes: Sequence[int], named: str) -> None:
        """Hosts leave, with their ranks and their agent.

        Raises:
            ValueError: they cannot, or nobody could go on.
        """
        self._hosts.begin(nodes)
        leave = [rank for rank, member in enumerate(self._world) if self._places[member].node in nodes]
        if not leave:
            self._hosts.let_go(Answer(outcome="done", message="they had no ranks"))
            return
        spares = sum(map(len, self._reserve.ready(self._hosts.open).values()))
        most = min(len(self._world) - len(leave) + spares, len(self._world))
        if named:
            size = parse_layout(named).world_size
        else:
            size, _ = largest(most, lambda size: self._job.resize(self._layout, size, ""))
        self._enter(self._summons_to(size, named, leave, ""))

    def _summons_to(self, size: int, named: str, ranks: Sequence[int], mode: str) -> Summons:
        """The crossing to ``size`` ranks.

        Raises:
            ValueError: there is no such world.
        """
        if unknown := [rank for rank in ranks if rank >= len(self._world)]:
            raise MembershipError(f"there are no ranks {unknown}; the run has 0 to {len(self._world) - 1}")
        if self._request.verb == "reclaim":  # these places, and ranks that are there already have others
            free, ready = self._loans.alone({self._spot(member) for member in self._living()}, self._hosts.open), {}
        else:
            free, ready = self._free(size), self._reserve.ready(self._hosts.open)
        chosen = next_world(
            self._world,
            {member: one.node for member, one in self._places.items()},
            size=size,
            leave={self._world[rank] for rank in ranks},
            free={node: len(slots) + len(ready.get(node, ())) for node, slots in free.items()},
            first=len(self._places),
            ready=ready,
        )
        newcomers = (
            self._places.get(m) or Newcomer(member=m, node=n, slot=free[n].pop(0)) for m, n in chosen.newcomers.items()
        )
        return Summons(
            generation=self._generation + 1,
            old=self._world,
            new=chosen.new,
            newcomers=tuple(newcomers),
            layout=self._job.resize(self._layout, size, named),
            mode=mode,
        )

    def _free(self, most: int) -> dict[int, list[int]]:
        """Free places of each node, at most ``most``: one rank a device, on CPUs as many as are wanted."""
        holders = {*self._world, *self._living(), *self._reserve.members}
        taken = {self._spot(member) for member in holders} | {*self._loans.spots}
        free = {}
        for node in self._hosts.open:
            there = {slot for at, slot in taken if at == node}
            last = self._hosts.devices[node] if self._meeting.device == "cuda" else len(there) + most
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
        elif summons.lost and summons.stage == "asked" and sight.waited > MEND_SECONDS:
            raise RunFailedError(f"{summons.why}; the others have not gone on within {MEND_SECONDS:g} s")
        elif summons.stage == "asked" and not sight.published and set(sight.heard.values()) == {summons.mark}:
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
            published=self._number >= 0 or bool(summons.lost),
            answer=self._losses.outcome(summons) if summons.lost else self._heard(),
        )

    def _heard(self) -> Answer | None:
        return self._desk.heard(self._number) if self._number >= 0 else None

    def _enter(self, summons: Summons) -> None:
        """Tell everybody of a stage."""
        self._summons, self._since = summons, self._clock()
        if summons.stage == "coming":
            self._generation = summons.generation
            self._loans.begin(self._layout)
            self._places |= {one.member: one for one in summons.newcomers}
        elif summons.stage == "done":
            if self._loans.settle(self._request.verb, map(self._spot, summons.leavers), summons.layout):
                self._log.write("lent", id=self._request.id, places=self._loans.words(self._loans.spots))
            self._world, self._layout = summons.new, summons.layout
            self._losses.crossed(summons)
            self._in_generation = summons.generation
        self._meeting.board.post(SUMMONS, summons.to_json())
        self._reserve.call(summons.coming)
        self._log.write(
            "crossing",
            id=self._request.id,
            world=summons.generation,
            stage=summons.stage,
            members=list(summons.new),
            nodes=[self._places[member].node for member in summons.new],
            newcomers=list(summons.coming),
            leavers=list(summons.leavers),
            layout=summons.layout,
            reason=summons.reason or summons.why,
            lost=list(summons.lost),
        )

    def end(self) -> None:
        """The run has ended: a crossing that is open is over with it, and whoever asked hears of that."""
        if self._summons is not None and self._summons.lost:
            self._summons = None
        if self._summons is not None:
            sight = replace(self._sight(self._summons, stopping=True), living=())
            if (following := advance(self._summons, sight)) != self._summons:
                self._enter(following)
            self._settle(following)
        if (answer := self._hosts.see_off(at_once=True)) is not None:
            self._answer(answer)

    def _settle(self, summons: Summons, stuck: Sequence[int] = ()) -> None:
        """Answer whoever asked; the next one may come.

        Args:
            summons: as it has come out.
            stuck: members that were killed and are not gone.

        Raises:
            RunFailedError: what was left after a loss could not go on.
        """
        if summons.lost:
            self._summons = None
            if summons.stage == "undone":
                raise RunFailedError(f"{summons.why}; and the run cannot go on: {summons.reason}")
            if summons.stage == "done" and (request := self._losses.replacement()) is not None:
                self._desk.scale(request)
            return
        heard = self._desk.heard(self._number) if self._number >= 0 else None
        answer = heard or Answer(outcome="aborted", message=summons.reason)
        if self._request.verb == "lend" and answer.outcome == "done":
            gone = [self._spot(member) for member in summons.leavers if member not in stuck]
            free = self._loans.words(gone) or "none yet"
            answer = replace(answer, message=f"{answer.message}; free, and kept until they are reclaimed: {free}")
        if stuck:
            answer = replace(answer, message=f"{answer.message}; killed and not gone: members {stuck}")
        self._summons, self._number = None, -1
        if self._hosts.going and summons.stage == "done":
            self._hosts.let_go(answer)
        else:
            self._hosts.stay()
            self._answer(answer)

    def _answer(self, answer: Answer) -> None:
        """Tell whoever asked; a signal asks for no answer, but that its host is let go."""
        self._desk.answer(self._request, answer)
        if self._request.by == "SIGTERM" and answer.outcome != "done":
            self._give_up(f"the hosts that were told to go cannot leave: {answer.message}")
