"""The agent: one process on each node that starts the node's ranks, watches them, and ends them.

Store, requests and heartbeats live here, so that they outlive any rank; ranks are forked by another process
(:mod:`dynatrain.cluster.forkserver`), so that no fork happens beside the store's threads. However a run ends, nothing
of it is left when :func:`drive` returns.
"""

import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Literal

from torch.distributed import DistError

from dynatrain.cluster.bond import Bond
from dynatrain.cluster.causes import SAVED
from dynatrain.cluster.context import RankContext, Report
from dynatrain.cluster.desk import Desk
from dynatrain.cluster.heart import Pulse
from dynatrain.cluster.interrupts import Interrupted, Interrupts
from dynatrain.cluster.kernel import leave_realtime, signal_name
from dynatrain.cluster.lead import Lead
from dynatrain.cluster.meeting import Job, Meeting, RunFailedError, contexts, describe
from dynatrain.cluster.noted import write_down
from dynatrain.cluster.part import Part
from dynatrain.cluster.peers import Peers, Status
from dynatrain.cluster.ranks import Ranks
from dynatrain.cluster.spawner import Spawner
from dynatrain.cluster.succession import Heir
from dynatrain.cluster.summons import GONE_SECONDS, Newcomer, Summons
from dynatrain.cluster.vitals import Vitals
from dynatrain.observe.log import Log
from dynatrain.observe.requests import Inbox, Request, new_id

FAILED = 3
TICK_SECONDS = 0.2
START_SECONDS = 120.0  # for the fork server to import torch and the ranks' module
STOP_SECONDS = 3.0  # for ranks to reach a step edge; with the next, all is gone within 5 s
KILL_SECONDS = 0.7
HAND_SECONDS = 1.0  # for the others to hear that they go on
HALTED_SECONDS = 2.0  # between two steps of an agent that was halted meanwhile, or hung in the disk


class Agent:
    """Runs one job on this node, once the agents have met.

    Args:
        job: what to run.
        meeting: what the agents have in common.
        spawner: a fork server.
        interrupts: the signals that end the agent.
        log: of events.
        ready: whether the fork server is known to be.

    Attributes:
        heir: what this agent goes on with, once it has lost the one that leads.
    """

    heir: Heir

    def __init__(
        self, job: Job, meeting: Meeting, spawner: Spawner, interrupts: Interrupts, log: Log, *, ready: bool = False
    ) -> None:
        self._job = job
        self._meeting = meeting
        self._spawner = spawner
        self._interrupts = interrupts
        self._log = log
        self._began = time.monotonic()
        self._ranks = Ranks(spawner)
        self._pulse = Pulse(meeting.board)
        self._peers = Peers(meeting.board, job.place)
        self._desk = Desk(Inbox(job.run.requests), meeting.board, log)
        self._lead = Lead(job, meeting, self._desk, self._peers, log)
        self._part = Part(
            meeting.run,
            self._ranks,
            self._pulse,
            self._told,
            log,
            patience=job.liveness_seconds,
            leave_seconds=job.leave_seconds,
            world=meeting.world,
            summons=Summons.from_json(text) if (text := getattr(meeting.admission, "summons", "")) else None,
        )
        self._vitals = Vitals(
            self._ranks,
            self._pulse,
            self._part,
            self._peers,
            patience=job.liveness_seconds,
            pause=interrupts.wait,
            logs=job.run.logs,
            survives=job.survives,
        )
        self._next_tick = 0.0
        self._stop_code = 0  # 130 or 143 once the agent was asked to end
        self._stop_end = 0.0  # when ranks that were asked to stop are killed
        self._leaving = False  # this host was told to go, and the others may go on
        self._handing_end = 0.0  # when ranks that stop for a new lead are to have stopped; 0 where this one stays
        self._ending = False  # ranks that end now end by our hand
        self._ready = self._began if ready else 0.0
        self._stepped = self._began
        self._bond = Bond(job, meeting, self._peers, self._part, self._ranks)

    def run(self) -> int | None:
        """Start the ranks, watch them, leave nothing behind; returns the exit code.

        None where the agent that leads is lost: the ranks have ended, and :attr:`heir` is there.
        """
        code: int | None = FAILED
        try:
            code = self._watch()
        except Interrupted:
            code = self._interrupts.exit_code
        except RunFailedError as failure:
            code = self._break_off(str(failure))
        except DistError as error:
            code = self._break_off(f"the store is lost: {str(error).splitlines()[0]}")
        finally:
            if code is not None:
                self._end(code)
            self._bond.close()
        return code

    def _break_off(self, reason: str) -> int | None:
        """Something has failed: the run, or the agent that leads it; gives what :meth:`run` does."""
        if lost := self._job.tenure.lost:
            self._ending = True
            self._log.write("deposed", reason=lost)
            self._job.announce(f"This agent was taken for dead, and ends with its ranks: {lost}.")
            return FAILED
        lost = self._bond.lost()
        if lost and self._leaving and self._peers.handed_over:
            return 0
        code = self._vitals.code()
        if lost and self._vitals.ended_well and (not code or self._stop_code or self._bond.is_over):
            return code  # the agent that leads has been faster
        if lost and not self._stop_code and self._abandon(lost):
            return None
        self._fail(reason)
        return FAILED

    def _abandon(self, lost: str) -> bool:
        """End this node's ranks, whose run has lost its lead; False where one does not end."""
        self._ending = True
        self.heir = self._bond.heir()
        self._log.write("lead_lost", node=self._job.place.node, reason=lost)
        self._job.announce(f"The agent that leads is lost: {lost}. This host's ranks end, and begin anew.")
        self._ranks.kill(self._ranks.living)
        end = time.monotonic() + GONE_SECONDS
        with suppress(RunFailedError):  # the fork server is lost, too: then they never are known to have ended
            while self._ranks.living and time.monotonic() < end:
                for report in self._receive():
                    self._note(report)
                Interrupts.sleep(0.05, self._spawner)
        return not self._ranks.living

    def _watch(self) -> int:
        self._bond.tie()
        if self._meeting.admission is None:
            self._log.write("agent_started", pid=os.getpid(), **describe(self._job, self._meeting))
        place = self._job.place
        if place.node == 0 and (
            why := self._job.tenure.say_where(place.host, self._meeting.store.port, self._job.secret)
        ):
            self._job.announce(f"No agent can join: {why}.")
        if self._meeting.note:
            self._job.announce(f"Running {self._meeting.note}")
        self._start()
        while (code := self._step()) is None:
            self._interrupts.wait(TICK_SECONDS, self._spawner)
        if not (self._peers.released or self._handing_end):
            self._peers.say(Status(state="done", code=code))
        return code

    def _told(self, newcomers: Iterable[Newcomer], world: Sequence[int], generation: int) -> list[RankContext]:
        """What the newcomers of this node are told."""
        return contexts(self._job, self._meeting, newcomers, world, generation=generation)

    def _start(self) -> None:
        """Fork this node's ranks as soon as the fork server is ready."""
        end = time.monotonic() + START_SECONDS
        forked = False
        while not (forked and self._ranks.all_forked):
            self._interrupts.check()
            for report in self._receive():
                if report.kind == "broken":
                    raise RunFailedError(f"the ranks' module cannot be used: {report.words}")
                if report.kind == "ready":
                    self._ready = time.monotonic()
                self._note(report)
            if self._ready and not forked:
                forked = True
                self._ranks.fork(contexts(self._job, self._meeting, self._meeting.seats, self._part.world))
            self._peers.say(Status(heard=self._part.heard))
            self._bond.look()  # the store answers, however long the fork server takes
            if time.monotonic() > end:
                raise RunFailedError(f"the fork server was not ready within {START_SECONDS:g} s")
            self._interrupts.wait(TICK_SECONDS, self._spawner)
        if self._meeting.admission is not None:
            self._job.announce(f"Node {self._job.place.node} of the run, with places for ranks and none yet.")
            return
        self._pulse.watch(self._ranks.living)
        seconds = {
            "server": round(self._ready - self._spawner.began, 3),
            "fork": round(time.monotonic() - self._ready, 3),
        }
        pids = self._ranks.pids
        self._log.write("ranks_started", ranks=list(pids), pids=list(pids.values()), seconds=seconds)
        world = f"{len(pids)} of {self._meeting.world_size}" if self._job.place.nodes > 1 else f"{len(pids)}"
        self._job.announce(f"{world} ranks on {self._meeting.device} ({self._meeting.backend})")

    def _step(self) -> int | None:
        """Take in what has happened; the exit code once the run is over.

        Raises:
            RunFailedError: it cannot go on.
        """
        self._require_tenure()
        for report in self._receive():
            self._note(report)
        if self._interrupts.received and not self._stop_code:
            self._heed(self._interrupts.received)
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._tick()
        if self._peers.released:
            self._job.announce("This host has left the run, which goes on without it.")
            return 0
        fallen = len(self._vitals.fallen)
        if failure := self._vitals.failure(now, stopping=bool(self._stop_code)):
            raise RunFailedError(failure)
        if len(self._vitals.fallen) > fallen:
            self._tick()
        over = self._vitals.over()
        if over and not self._stop_code:
            self._peers.look()
            self._follow_stop()
            if self._peers.handed_over:
                raise RunFailedError("the agent that leads has left")
            if self._handing_end and self._vitals.code() == SAVED:
                return self._leave_to_others()
        if self._stop_code:
            over = over or now > self._stop_end or len(self._interrupts.received) > 1
        return (self._vitals.code() or self._stop_code or self._peers.code) if over else None

    def _tick(self) -> None:
        """Everything that is looked at rather than reported."""
        self._pulse.look()
        self._peers.look()
        self._bond.look()
        self._follow_stop()
        self._say()
        if self._job.place.node == 0:
            self._desk.serve()
            self._lead.look(stopping=bool(self._stop_code or self._handing_end))
            if self._lead.hands_over:
                self._hand_over()
            if self._lead.must_stop and not self._stop_code:
                self._job.announce(f"{self._lead.must_stop[0].upper()}{self._lead.must_stop[1:]}.")
                self._stop(signal.SIGTERM, self._job.place.node)
        self._part.look(time.monotonic())

    def _hand_over(self) -> None:
        """Have the ranks stop, saved, for the others to go on without this host; where they do not, the run stops."""
        now = time.monotonic()
        if not self._handing_end:
            self._handing_end = now + self._job.grace_seconds
            self._say()  # before the ranks hear of it: the others are to know why they end
            self._desk.stop(Request(id=new_id(), verb="stop", by="SIGTERM"))
        elif now > self._handing_end and not self._stop_code:
            self._stop(signal.SIGTERM, self._job.place.node)

    def _leave_to_others(self) -> int:
        """All ranks have stopped, saved, and the others have heard that they go on; the exit code."""
        self._job.tenure.drop()
        self._log.write("host_left", node=self._job.place.node)
        self._job.announce("This host leaves the run, which the others go on with.")
        Interrupts.sleep(HAND_SECONDS)
        return 0

    def _require_tenure(self) -> None:
        """Do nothing more as the agent that leads where another does: this one may have been halted for long.

        Raises:
            RunFailedError: another has taken the run over.
        """
        now = time.monotonic()
        late, self._stepped = now - self._stepped > HALTED_SECONDS, now
        lost = self._job.tenure.look() if late else self._job.tenure.lost
        if lost and not self._handing_end:  # else it is as it should be
            raise RunFailedError(lost)

    def _follow_stop(self) -> None:
        """Stop where another agent was asked to."""
        node, number = self._peers.stopping()
        if number and not self._stop_code:
            self._stop(number, node)

    def _say(self) -> None:
        """Tell the other agents how this one is."""
        self._peers.say(
            Status(
                state=self._state,
                signal=max(0, self._stop_code - 128),
                living=self._ranks.living,
                heard=self._part.heard,
                lost=self._part.lost,
                fallen=tuple(self._vitals.fallen.items()),
            )
        )

    @property
    def _state(self) -> Literal["running", "stopping", "leaving", "handing"]:
        if self._stop_code:
            return "stopping"
        if self._handing_end:
            return "handing"
        return "leaving" if self._leaving else "running"

    def _heed(self, received: list[int]) -> None:
        """Do what a signal asks for: SIGTERM takes this host out of the run where others can go on.

        All else ends the run, and so does a second signal.
        """
        saves = self._job.take_up is not None and self._job.grace_seconds > 0
        followed = saves and len(self._peers.nodes) > 1 and bool(self._part.members)
        if received != [signal.SIGTERM] or (self._job.place.node == 0 and not followed):
            if received[0] == signal.SIGTERM and len(self._peers.nodes) > 1:
                self._job.announce("This agent leads a run that is not saved at its end, so it stops.")
            self._stop(received[0], self._job.place.node)
        elif not self._leaving:
            self._leaving = True
            self._log.write("signal", signal="SIGTERM", node=self._job.place.node)
            self._job.announce(
                f"SIGTERM: this host hands over within {self._job.drain_seconds:g} s and leaves; once more to end the "
                "run at once."
            )

    def _stop(self, number: int, node: int) -> None:
        """Ask all ranks to stop at their next step edge, and set the time at which they are killed."""
        self._stop_code = 128 + number
        # Ctrl-C is a person who waits; SIGTERM leaves the time to save.
        grace = self._job.grace_seconds if number == signal.SIGTERM else 0.0
        self._stop_end = time.monotonic() + max(STOP_SECONDS, grace)
        name = signal_name(number)
        self._log.write("signal", signal=name, node=node)
        self._job.announce(f"{name}: stopping at the next step edge; once more to end at once.")
        self._say()  # before the ranks hear of it: where they end at once, the others are to know why
        if self._job.place.node == 0:
            self._desk.stop(Request(id=new_id(), verb="stop", by=name))

    def _fail(self, reason: str) -> None:
        """Say why the run cannot go on, to everybody."""
        self._ending = True
        self._log.write("run_failed", reason=reason)
        self._job.announce(f"The run failed: {reason}")
        # Without ranks, and none on their way, it is this host alone that is lost to the run.
        summons = self._part.summons
        idle = self._job.place.node > 0 and not self._part.members and (summons is None or not summons.is_open)
        with suppress(DistError):  # without a store the others see it as we did
            self._peers.say(Status(state="left" if idle else "failed", reason=reason))

    def _end(self, code: int) -> None:
        """Kill what lives; wait a bounded time, since no signal ends a process that hangs in the kernel."""
        self._ending = True
        self._ranks.kill(self._ranks.living)
        end = time.monotonic() + KILL_SECONDS
        with suppress(RunFailedError):
            while self._ranks.pids and self._ranks.living and time.monotonic() < end:
                for report in self._receive():
                    self._note(report)
                Interrupts.sleep(0.05, self._spawner)
        with suppress(DistError):
            if self._job.place.node == 0 and not self._job.tenure.lost:
                self._desk.serve()  # what the ranks answered with their last breath
                self._lead.end()
        left = [self._part.name(member) for member in self._ranks.living if member in self._ranks.pids]
        if not self._spawner.close(KILL_SECONDS) or left:
            self._job.announce(f"Not gone, and nothing more can be done: {', '.join(left) or 'the fork server'}.")
        if self._peers.released:
            with suppress(DistError):
                self._peers.say(Status(state="left"))
        leave_realtime()
        self._log.write("agent_ended", exit=code, seconds=round(time.monotonic() - self._began, 3))

    def _receive(self) -> list[Report]:
        try:
            return self._spawner.receive()
        except ConnectionError:
            raise RunFailedError("the fork server was killed, and its ranks with it") from None

    def _note(self, report: Report) -> None:
        """Take in and write down what the fork server says of a rank."""
        self._ranks.note(report)
        write_down(report, self._log, self._part, self._pulse, self._job.announce, by_agent=self._ending)
