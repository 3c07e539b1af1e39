"""How agents go on with a run whose lead they have lost; :mod:`dynatrain.cluster.heirs` has the rules.

Whoever takes the run over opens a store of its own, says in the run's folder where that is, waits a moment for the
others, seats the ranks, and has them begin from the newest checkpoint. All else is as at any start.
"""

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed import DistError, PrefixStore, TCPStore

from dynatrain.cluster.board import Board
from dynatrain.cluster.heirs import Legacy, Seating, Sign, brought, fate, seated
from dynatrain.cluster.interrupts import Interrupts
from dynatrain.cluster.meeting import Host, Job, Meeting, RunFailedError
from dynatrain.cluster.place import PlaceError
from dynatrain.cluster.store import host_store, join_store, prefix
from dynatrain.cluster.summons import Newcomer
from dynatrain.cluster.tie import Tie, nobody_listens
from dynatrain.observe.address import Address
from dynatrain.observe.log import Log
from dynatrain.observe.mark import AgentMark, MarkError, last_sign

GATHER_SECONDS = 3.0
"""For the others to come to whoever leads now."""
SEAT_SECONDS = 30.0
"""For whoever leads now to say where ranks are."""
DISK_SECONDS = 60.0
"""For the run's folder to be readable."""
_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Heir:
    """What an agent brings along, besides what it knows.

    Attributes:
        legacy: what it knows.
        meeting: what the agents had in common before.
        place: name of its place.
    """

    legacy: Legacy
    meeting: Meeting
    place: str

    @property
    def word(self) -> dict[str, Any]:
        """What it says of itself to whoever leads."""
        return {
            "place": self.place,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "devices": torch.cuda.device_count(),
            "slots": list(self.legacy.slots),
        }


def heir_of(
    job: Job,
    meeting: Meeting,
    *,
    nodes: Collection[int],
    slots: tuple[int, ...],
    world_size: int,
    layout: str,
    here: str,
    handed: bool = False,
) -> Heir:
    """What an agent goes on with; arguments as of :class:`~dynatrain.cluster.heirs.Legacy`.

    Args:
        job: what is run.
        meeting: what the agents have in common.
        nodes: that have an agent of the run, and stay.
        slots: places of this node that had ranks.
        world_size: ranks of the world.
        layout: theirs, as text.
        here: this machine's address.
        handed: whether the agent that led has said that it leaves.
    """
    place = job.place
    # Of several agents in torchrun's store the one that leads need not be gone with that.
    gone = () if place.killed_after is not None or place.node == 0 else (0,)
    legacy = Legacy(
        attempt=meeting.attempt,
        node=place.node,
        heirs=tuple(node for node in nodes if node not in gone),
        slots=slots,
        world_size=world_size,
        layout=layout,
        host=place.host,
        port=place.port,
        here=here,
        handed=handed,
    )
    name = job.claim.place if job.claim is not None else socket.gethostname()
    return Heir(legacy=legacy, meeting=meeting, place=name)


def succeed(job: Job, heir: Heir, interrupts: Interrupts) -> tuple[Job, Meeting] | int:
    """Go on with a run whose lead is lost; this node's ranks have ended.

    Returns:
        The job and what the agents have in common now; or the exit code, where the run has ended instead.

    Raises:
        RunFailedError: it cannot go on, or not with this agent.
        Interrupted: a signal came.
    """
    began = time.monotonic()
    while True:
        found = _await_fate(job, heir.legacy, interrupts)
        if isinstance(found, int):
            return found
        try:
            return _lead(job, heir, interrupts, began) if found is None else _follow(job, heir, found, interrupts)
        except (DistError, PlaceError):  # of those who lead now: they are lost, too, and this has a next time
            assert found is not None
            address = Address.read(job.run.path)
            known = address is not None and address.attempt == found.attempt
            host, port = (address.host, address.port) if address is not None and known else ("", 0)
            heir = replace(heir, legacy=replace(heir.legacy, attempt=found.attempt, host=host, port=port, handed=False))


def _await_fate(job: Job, legacy: Legacy, interrupts: Interrupts) -> AgentMark | int | None:
    """Wait until somebody leads: its mark; None for this agent itself; the exit code where the run is over.

    Raises:
        RunFailedError: the agent that led lives, and this one cannot reach it; or the disk is away.
    """
    watch = _Watch(job, legacy)
    gone_since = 0.0
    while True:
        interrupts.check()
        try:
            mark, sign = watch.look()
            word = fate(sign, legacy.attempt)
            if word == "followed":
                return mark
            if word == "over":
                return int(sign.exit or 0)
            if word == "lives":
                raise RunFailedError(
                    "the agent that leads lives, and this host is cut off from it; the run goes on there"
                )
            if word == "gone":
                gone_since = gone_since or time.monotonic()
                if time.monotonic() - gone_since >= legacy.head_start and job.tenure.succeed(legacy.attempt):
                    return None
        except (OSError, MarkError) as error:
            if watch.waited > DISK_SECONDS:
                raise RunFailedError(f"the agent that leads is lost, and {job.run.path} is, too: {error}") from error
        interrupts.pause(_POLL_SECONDS)


class _Watch:
    """Looks at what is left of the agent that led.

    Args:
        job: what is run.
        legacy: what this agent knows.
    """

    def __init__(self, job: Job, legacy: Legacy) -> None:
        self._run = job.run
        self._legacy = legacy
        self._began = self._seen = time.monotonic()
        self._last = -1

    @property
    def waited(self) -> float:
        """Seconds."""
        return time.monotonic() - self._began

    def look(self) -> tuple[AgentMark, Sign]:
        """Whose mark is there, and what follows.

        Raises:
            MarkError, OSError: the folder cannot be read.
        """
        mark, last = self._run.agent(), last_sign(self._run.path)
        if mark is None:
            raise MarkError("there is no agent.json")
        if last != self._last:
            self._last, self._seen = last, time.monotonic()
        host, port = self._legacy.host, self._legacy.port
        return mark, Sign(
            attempt=mark.attempt,
            exit=mark.exit,
            ended=self._legacy.handed or mark.liveness() == "gone" or (host != "" and nobody_listens(host, port)),
            silent=time.monotonic() - self._seen,
            waited=self.waited,
        )


def _lead(job: Job, heir: Heir, interrupts: Interrupts, began: float) -> tuple[Job, Meeting]:
    """Open a store, gather the others, seat the ranks.

    Raises:
        RunFailedError: no ranks can go on.
    """
    legacy, attempt = heir.legacy, heir.legacy.attempt + 1
    store = _store_at(legacy)
    if why := job.tenure.say_where(legacy.here, store.port, job.secret):
        raise RunFailedError(f"this host was to lead, and cannot: {why}")
    board = _board(store, attempt)
    words = {legacy.node: heir.word} | _gather(board, legacy, interrupts)
    try:
        devices = {node: word["devices"] for node, word in words.items()} if heir.meeting.device == "cuda" else None
        slots = brought({node: word["slots"] for node, word in words.items()}, devices, legacy.world_size)
        seating = seated(legacy.node, slots, legacy.layout, legacy.world_size, job.resize)
        note = job.take_up(job.run, seating.layout) if job.take_up is not None else ""
    except ValueError as error:
        board.decide("seating", {"failed": str(error)})
        raise RunFailedError(f"the agent that led is lost, and nobody can go on: {error}") from error
    board.decide("seating", _told(seating, words))
    job.announce(
        f"This host leads the run from here on, with {len(seating.seats)} ranks on {len(words)} hosts: {note}."
    )
    with Log(job.run.events, generation=0, attempt=attempt) as log:
        log.write(
            "succession",
            hosts=[words[node]["host"] for node in seating.nodes],
            world_size=len(seating.seats),
            layout=seating.layout,
            note=note,
            seconds=round(time.monotonic() - began, 3),
        )
    return _met(job, heir, store, attempt, seating, words)


def _store_at(legacy: Legacy) -> TCPStore:
    """A store at the port of the one before, which a firewall lets through; at another where that is taken here.

    Raises:
        RunFailedError: nobody can listen here.
    """
    with suppress(PlaceError):
        return host_store(legacy.here, legacy.port)
    try:
        return host_store(legacy.here)
    except PlaceError as error:
        raise RunFailedError(f"this host was to lead, and cannot: {error}") from error


def _gather(board: Board, legacy: Legacy, interrupts: Interrupts) -> dict[int, dict[str, Any]]:
    """What those say of themselves that have come, by old node: all heirs, or whoever has come in time."""
    awaited = set(legacy.heirs) - {legacy.node}
    end = time.monotonic() + GATHER_SECONDS
    found: dict[int, dict[str, Any]] = {}
    while awaited - found.keys() and time.monotonic() < end:
        for node in awaited - found.keys():
            if (text := board.peek(f"heir/{node}")) is not None:
                found[node] = json.loads(text)
        interrupts.pause(_POLL_SECONDS)
    return found


def _follow(job: Job, heir: Heir, lead: AgentMark, interrupts: Interrupts) -> tuple[Job, Meeting]:
    """Come to whoever leads now.

    Raises:
        RunFailedError: it goes on without this agent, or not at all.
        PlaceError, DistError: it is lost as well.
    """
    job.tenure.drop()
    address = _await_address(job, lead, interrupts)
    tie = Tie(address.host, address.port, job.liveness_seconds)
    try:
        store = join_store(address.host, address.port)
        board = _board(store, lead.attempt)
        board.post(f"heir/{heir.legacy.node}", json.dumps(heir.word))
        end = time.monotonic() + SEAT_SECONDS
        while (told := board.decided("seating")) is None:
            tie.answered()
            if time.monotonic() > end:
                raise RunFailedError(f"process {lead.pid} on {lead.host} leads the run, and seats nobody")
            interrupts.pause(_POLL_SECONDS)
    finally:
        tie.close()
    if "failed" in told:
        raise RunFailedError(f"the agent that led is lost, and nobody can go on: {told['failed']}")
    seating, words = _read(told)
    if heir.legacy.node not in seating.nodes:
        raise RunFailedError("the agent that led is lost, and this one has come too late to the next; dynatrain join")
    return _met(job, heir, store, lead.attempt, seating, words)


def _await_address(job: Job, lead: AgentMark, interrupts: Interrupts) -> Address:
    """Where the store of the agent ``lead`` listens.

    Raises:
        PlaceError: it does not say so.
    """
    end = time.monotonic() + GATHER_SECONDS
    while (found := Address.read(job.run.path)) is None or found.attempt != lead.attempt:
        if time.monotonic() > end:
            raise PlaceError(f"process {lead.pid} on {lead.host} leads the run, and does not say where")
        interrupts.pause(_POLL_SECONDS)
    return found


def _board(store: TCPStore, attempt: int) -> Board:
    return Board(PrefixStore(prefix(_nonce(attempt)), store), 1)


def _nonce(attempt: int) -> str:
    """Names the run in the store of a successor: there is no other run in it."""
    return f"attempt-{attempt}"


def _told(seating: Seating, words: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "nodes": list(seating.nodes.items()),
        "layout": seating.layout,
        "seats": [[seat.member, seat.node, seat.slot] for seat in seating.seats],
        "words": list(words.items()),
    }


def _read(told: Mapping[str, Any]) -> tuple[Seating, dict[int, dict[str, Any]]]:
    seats = tuple(Newcomer(member=member, node=node, slot=slot) for member, node, slot in told["seats"])
    return Seating(nodes=dict(told["nodes"]), layout=told["layout"], seats=seats), dict(told["words"])


def _met(
    job: Job,
    heir: Heir,
    store: TCPStore,
    attempt: int,
    seating: Seating,
    words: Mapping[int, Mapping[str, Any]],
) -> tuple[Job, Meeting]:
    """The job with this agent's new place in it, and what the agents have in common."""
    nonce, size = _nonce(attempt), len(seating.seats)
    run = PrefixStore(prefix(nonce), store)
    place = replace(
        job.place,
        node=seating.nodes[heir.legacy.node],
        nodes=len(seating.nodes),
        host=store.host,
        port=store.port,
        nonce=nonce,
        hosts_store=seating.nodes[heir.legacy.node] == 0,
    )
    meeting = replace(
        heir.meeting,
        store=store,
        run=run,
        board=Board(run, size),
        world_size=size,
        devices={new: words[old]["devices"] for old, new in seating.nodes.items()},
        attempt=attempt,
        note="",
        hosts={
            new: Host(place=word["place"], name=word["host"], pid=word["pid"], devices=word["devices"])
            for old, new in seating.nodes.items()
            for word in (words[old],)
        },
        seats=seating.seats,
        each=max(Counter(seat.node for seat in seating.seats).values()),
        admission=None,
    )
    return replace(job, place=place, world_size=size, layout=seating.layout, attempt=attempt), meeting
