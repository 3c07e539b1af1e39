"""Node 0's agent leads the run through changes of its members, one at a time; later requests wait."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dynatrain.cluster.alarm import put_up
from dynatrain.cluster.desk import Desk
from dynatrain.cluster.heart import read_beat
from dynatrain.cluster.lost import aftermath
from dynatrain.cluster.meeting import Job, Meeting, RunFailedError, first_world
from dynatrain.cluster.membership import MembershipError, next_world
from dynatrain.cluster.part import SUMMONS
from dynatrain.cluster.peers import Peers
from dynatrain.cluster.summons import Newcomer, Sight, Summons, advance, is_over
from dynatrain.cluster.worlds import COMMIT, crossing_board
from dynatrain.layout.text import parse_layout
from dynatrain.observe.log import Log
from dynatrain.observe.requests import Answer, Request, new_id

MEND_SECONDS = 300.0
"""For what is left of a world to go on after a loss, files read from a slow disk included."""


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
        self._generation = 0  # the last one that a crossing had
        self._summons: Summons | None = None
        self._replacements = job.replacements
        self._missing = 0  # members lost since the run had the layout
        self._full = job.layout
        self._gone: dict[int, str] = {}  # members that are lost, ever, and what has become of each
        self._request = Request(id="none", verb="stop")  # of the summons
        self._number = -1  # of what was asked of the ranks
        self._since = 0.0

    def look(self, *, stopping: bool) -> None:
        """Go as far as can be gone.

        Args:
            stopping: the run was asked to stop: no crossing begins, one that has not begun is given up.
        """
        self._look_at_layout()
        if self._job.survives and not stopping and (lost := self._lost()):
            self._lose(lost)
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

    def _lost(self) -> dict[int, str]:
        """Members that are lost and not mourned yet, and what has become of each."""
        for node, why in self._peers.silent(self._job.liveness_seconds).items():
            self._peers.give_up(node)
            self._gone |= {member: why for member, one in self._places.items() if one.node == node}
        for status in self._peers.everyone.values():
            self._gone |= dict(status.fallen)
        known = self._summons.lost if self._summons is not None else ()
        return {member: why for member, why in self._gone.items() if member in self._world and member not in known}

    def _lose(self, lost: dict[int, str]) -> None:
        """Summon who is left.

        Raises:
            RunFailedError: nobody can go on.
        """
        if self._summons is not None:
            self._cut_short(self._summons, "; ".join(lost.values()))
        if not {*self._world} & {*lost}:
            return  # it had left, or not come
        if early := [member for member in self._world if not read_beat(self._meeting.board, member).layout]:
            raise RunFailedError(f"{'; '.join(lost.values())}; members {early} had not made a step yet")
        try:
            summons = aftermath(
                self._world,
                {member: self._gone[member] for member in self._world if member in self._gone},
                generation=self._generation + 1,
                layout=lambda size: self._job.resize(self._layout, size, ""),
            )
        except ValueError as error:
            raise RunFailedError(str(error)) from error
        self._request, self._number = Request(id=f"loss-{summons.generation}", verb="stop"), -1
        self._generation = summons.generation
        self._full = self._full if self._missing else self._layout
        self._missing += len(lost)
        put_up(self._meeting.run, summons)
        self._enter(summons)
        self._job.announce(f"{summons.why}. Going on with {len(summons.new)} ranks in {summons.layout}.")

    def _replace(self) -> None:
        """Ask for the size and the layout before, once for all losses since, as long as replacements are left."""
        if self._replacements >= self._missing:
            self._replacements -= self._missing
            self._missing = 0
            arguments = {"size": parse_layout(self._full).world_size, "layout": self._full}
            self._desk.scale(Request(id=new_id(), verb="scale", arguments=arguments, by="loss"))

    def _cut_short(self, summons: Summons, why: str) -> None:
        """A crossing into which a loss has fallen: whether it stands is decided now, if it was not before."""
        board = crossing_board(self._meeting.run, summons.generation, summons.holders)
        board.give_up(summons.generation, why)
        committed = "abort" not in board.decide(COMMIT, {"abort": why})
        if self._number >= 0:  # else whoever is rank 0 next would take up what the one before was asked
            told = Answer(outcome="done" if committed else "aborted", message=why)
            self._meeting.board.answer(self._number, told.to_json())
            self._desk.serve()
        if summons.stage in {"coming", "asked"}:
            self._enter(summons.at("done") if committed else summons.at("undone", why))
        self._settle(summons)

    def _begin(self, request: Request) -> None:
        """Summon who is to come, or answer at once."""
        wanted, size = request.arguments, len(self._world)
        named = str(wanted.get("layout", ""))
        ranks: list[int] = wanted.get("leave", [])
        try:
            to = int(wanted.get("size") or (parse_layout(named).world_size if named else size - len(set(ranks))))
            if to != size or ranks:
                self._request = request
                self._enter(self._summons_to(to, named, ranks, str(wanted.get("mode", ""))))
            elif named:
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
        taken = {(self._places[m].node, self._places[m].slot) for m in {*self._world, *self._living()}}
        free = {}
        for node in range(self._job.place.nodes):
            there = {slot for at, slot in taken if at == node}
            last = self._meeting.devices[node] if self._meeting.device == "cuda" else len(there) + most
            free[node] = [slot for slot in range(last) if slot not in there]
        return free

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
            answer=self._answer(summons),
        )

    def _answer(self, summons: Summons) -> Answer | None:
        """What has become of a crossing; None while that is open. Of a loss nobody was asked."""
        if not summons.lost:
            return self._desk.heard(self._number) if self._number >= 0 else None
        found = crossing_board(self._meeting.run, summons.generation, summons.holders).decided(COMMIT)
        if found is None:
            return None
        return Answer(outcome="aborted" if "abort" in found else "done", message=found.get("abort", ""))

    def _enter(self, summons: Summons) -> None:
        """Tell everybody of a stage."""
        self._summons, self._since = summons, self._clock()
        if summons.stage == "coming":
            self._generation = summons.generation
            self._places |= {one.member: one for one in summons.newcomers}
        elif summons.stage == "done":
            self._world, self._layout = summons.new, summons.layout
            self._missing = self._missing if summons.lost else 0
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
            reason=summons.reason or summons.why,
            lost=list(summons.lost),
        )

    def end(self) -> None:
        """The run has ended: a crossing that is open is over with it, and whoever asked hears of that."""
        if self._summons is None or self._summons.lost:
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

        Raises:
            RunFailedError: what was left after a loss could not go on.
        """
        if summons.lost:
            self._summons = None
            if summons.stage == "undone":
                raise RunFailedError(f"{summons.why}; and the run cannot go on: {summons.reason}")
            if summons.stage == "done":
                self._replace()
            return
        heard = self._desk.heard(self._number) if self._number >= 0 else None
        answer = heard or Answer(outcome="aborted", message=summons.reason)
        if stuck:
            answer = replace(answer, message=f"{answer.message}; killed and not gone: members {stuck}")
        self._desk.answer(self._request, answer)
        self._summons, self._number = None, -1
