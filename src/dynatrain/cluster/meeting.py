"""How the agents of a run find each other and agree on what their ranks are told."""

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from dynatrain.cluster.board import Board
from dynatrain.cluster.claim import Admission, Claim
from dynatrain.cluster.context import RankContext
from dynatrain.cluster.door import knock, knock_in_vain
from dynatrain.cluster.interrupts import Interrupts
from dynatrain.cluster.kernel import AGENT_PRIORITY, take_realtime
from dynatrain.cluster.place import Device, Place, PlaceError, choose_device, share, wait_for_listener
from dynatrain.cluster.store import host_store, join_store, prefix
from dynatrain.cluster.summons import Newcomer
from dynatrain.cluster.tenure import Tenure
from dynatrain.observe.run import RunFolder

MEET_SECONDS = 60.0  # for the other agents to appear
ADMIT_SECONDS = 300.0  # for a run to take an agent in: it does so between two changes of members


TakeUp = Callable[[RunFolder, str], str]


class RunFailedError(Exception):
    """The run cannot go on; the text is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What an agent is to run.

    Attributes:
        run: the run folder.
        attempt: number of the run's agent, as node 0 knows it.
        place: this agent among the agents.
        world_size: ranks of all nodes at the start; node 0's word counts.
        layout: theirs, as text.
        resize: ``(present layout, size, named layout or "") -> layout``, all as text: that of a world of another size.
            Raises ``ValueError`` with the rule and the nearest choice where there is none.
        device: what was asked for.
        liveness_seconds: silence after which a rank counts as lost.
        grace_seconds: time after SIGTERM in which ranks may still save.
        leave_seconds: time for ranks that have left the world to end by themselves.
        drain_seconds: time from SIGTERM on one host of several until that is taken away.
        announce: takes lines for people.
        spares: ranks that are kept ready.
        prints: fingerprints of what must be alike on all nodes, by what they are of.
        secret: what proves that an agent belongs to the run; node 0's word counts.
        interface: of the network, for the ranks; empty for what torch finds.
        claim: of an agent that comes later than the first world; its place is not known before it is admitted.
        tenure: that of the agent which leads; of any other, one that it may come to.
        survives: whether ranks go on, by themselves, without members that are lost.
        replacements: how many lost members are replaced, where there is room, over the whole attempt.
        take_up: ``(run, layout) -> note``: has the run's folder say that its ranks begin anew in this layout; raises
            ``ValueError`` where it cannot. None where agents do not go on without the one that leads.
    """

    run: RunFolder
    attempt: int
    place: Place
    world_size: int
    layout: str
    resize: Callable[[str, int, str], str]
    device: Device
    liveness_seconds: float
    grace_seconds: float
    leave_seconds: float
    drain_seconds: float
    announce: Callable[[str], None]
    tenure: Tenure
    spares: int = 0
    prints: Mapping[str, str] = field(default_factory=dict)
    secret: str = ""
    interface: str = ""
    claim: Claim | None = None
    survives: bool = False
    replacements: int = 0
    take_up: TakeUp | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One agent, as the others know it.

    Attributes:
        place: name of its place; of one name there is one agent.
        name: of the machine.
        pid: its process.
        devices: CUDA devices that it has.
    """

    place: str
    name: str
    pid: int
    devices: int

    def __str__(self) -> str:
        """As in ``process 510 on gpu-a``."""
        return f"process {self.pid} on {self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """What the agents have in common once they have met.

    Attributes:
        store: hosted here, or a connection to it.
        run: the run's part of it.
        board: the run's.
        world_size: ranks of all nodes at the start.
        devices: CUDA devices of each node.
        device: ``cpu`` or ``cuda``, on every node.
        backend: ``gloo`` or ``nccl``.
        realtime: whether this node's ranks run in the real-time class.
        attempt: number of the run's agent.
        note: a remark for people, or empty.
        hosts: who the agents are, by node, in words; their places, by which no two may come.
        seats: every member of the first world and its place, by rank.
        each: ranks of a node in the first world, the most where nodes have not equally many.
        admission: how this agent came in, where the run had begun before.
    """

    store: TCPStore
    run: Store
    board: Board
    world_size: int
    devices: Mapping[int, int]
    device: str
    backend: str
    realtime: bool
    attempt: int
    note: str
    hosts: Mapping[int, Host] = field(default_factory=dict)
    seats: tuple[Newcomer, ...] = ()
    each: int = 1
    admission: Admission | None = None

    @property
    def world(self) -> tuple[int, ...]:
        """Members of the world when this agent came in, by rank."""
        return self.admission.world if self.admission else tuple(range(self.world_size))


def meet(job: Job, interrupts: Interrupts) -> Meeting:
    """Connect, wait for all agents, and take what must be alike for all from node 0: it alone has read a run's past.

    Raises:
        PlaceError: the user asked for what the machines, or this launch, cannot give.
        RunFailedError: an agent did not come.
        Interrupted: a signal came first.
    """
    store = _connect(job.place, interrupts)
    run = PrefixStore(prefix(job.place.nonce), store)
    board = Board(run, job.world_size)
    mine = _hello(job)
    if (first := board.decide(f"hello/{job.place.node}", mine)) != mine:
        told = f"the place of node {job.place.node} is taken by process {first['pid']} on {first['host']}"
        knock_in_vain(store, told, mine)
        raise PlaceError(f"Not admitted to the run: {told}; of one number there is one agent.")
    heard = _hear(board, job.place.nodes, interrupts)
    _require_alike({node: word["prints"] for node, word in heard.items()})
    world_size, devices = heard[0]["world_size"], {node: word["devices"] for node, word in heard.items()}
    each = len(share(world_size, job.place))
    device, note = choose_device(job.device, {node: (have, each) for node, have in devices.items()})
    seats = tuple(Newcomer(member=rank, node=rank // each, slot=rank % each) for rank in range(world_size))
    return Meeting(
        store=store,
        run=run,
        board=board,
        world_size=world_size,
        devices=devices,
        device=device,
        backend="nccl" if device == "cuda" else "gloo",
        # Not beside a CUDA device: a rank that waits for one spins, and would keep everybody else off its core.
        realtime=device == "cpu" and take_realtime(AGENT_PRIORITY),
        attempt=heard[0]["attempt"],
        note=note,
        hosts={
            node: Host(place=word["host"], name=word["host"], pid=word["pid"], devices=word["devices"])
            for node, word in heard.items()
        },
        seats=seats,
        each=each,
    )


def come_later(job: Job, interrupts: Interrupts) -> tuple[Job, Meeting]:
    """Come to a run that has begun: the job with the place that it gives this agent, and what it has in common with it.

    Raises:
        PlaceError: it does not take this agent in.
        Interrupted: a signal came first.
    """
    assert job.claim is not None
    store = _connect(job.place, interrupts)
    claim = replace(job.claim, devices=torch.cuda.device_count())
    found = knock(store, job.secret, claim, ADMIT_SECONDS, interrupts.pause)
    run = PrefixStore(prefix(found.nonce), store)
    meeting = Meeting(
        store=store,
        run=run,
        board=Board(run, found.world_size),
        world_size=found.world_size,
        devices={found.node: claim.devices},
        device=found.device,
        backend=found.backend,
        realtime=found.device == "cpu" and take_realtime(AGENT_PRIORITY),
        attempt=found.attempt,
        note="",
        each=found.each,
        admission=found,
    )
    place = replace(job.place, node=found.node, nodes=found.nodes, nonce=found.nonce)
    return replace(job, place=place, world_size=found.world_size, attempt=found.attempt), meeting


def _hello(job: Job) -> dict[str, Any]:
    """What an agent says of itself when it comes."""
    return {
        # Counted by NVML, without a CUDA context; and nothing is ever forked from this process.
        "devices": torch.cuda.device_count(),
        "world_size": job.world_size,
        "attempt": job.attempt,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "prints": dict(job.prints),
    }


def _require_alike(prints: Mapping[int, Mapping[str, str]]) -> None:
    """Refuse to begin where agents are of other code, or on other versions, than the first.

    Raises:
        PlaceError: with every difference.
    """
    problems = [
        f"node {node} has another {what} ({found.get(what, 'none')}) than node 0 ({ours})"
        for node, found in prints.items()
        for what, ours in prints[0].items()
        if found.get(what) != ours
    ]
    if problems:
        raise PlaceError(f"The agents are not alike: {'; '.join(problems)}. Install the same on every node.")


def contexts(
    job: Job, meeting: Meeting, coming: Iterable[Newcomer], world: Sequence[int], *, generation: int = 0
) -> list[RankContext]:
    """What those are told who come to this node.

    Args:
        job: what is run.
        meeting: what the agents have in common.
        coming: to any node.
        world: members of their world, by rank; empty for spares, which are of none.
        generation: of that world; 0 for the first, which nobody trains before.
    """
    return [
        RankContext(
            member=one.member,
            rank=world.index(one.member) if world else 0,
            node=one.node,
            local_rank=one.slot,
            world_size=len(world),
            # The first world's, also where later ones have other numbers: plans follow it, so all must know one.
            ranks_per_node=meeting.each if job.place.nodes > 1 else None,
            store_host=job.place.host,
            store_port=meeting.store.port,
            store_prefix=prefix(job.place.nonce),
            run=str(job.run.path),
            device=f"cuda:{one.slot}" if meeting.device == "cuda" else "cpu",
            backend=meeting.backend,
            generation=generation,
            attempt=meeting.attempt,
            realtime=meeting.realtime,
            interface=job.interface,
            joins=generation > 0,
            spare=not world,
            liveness_seconds=job.liveness_seconds,
        )
        for one in coming
        if one.node == job.place.node
    ]


def describe(job: Job, meeting: Meeting) -> dict[str, object]:
    """The fields of the event ``agent_started``."""
    return {
        "node": job.place.node,
        "nodes": job.place.nodes,
        "host": socket.gethostname(),
        "world_size": meeting.world_size,
        "seats": [seat.node for seat in meeting.seats],
        "device": meeting.device,
        "backend": meeting.backend,
        "realtime": meeting.realtime,
        "note": meeting.note,
    }


def _connect(place: Place, interrupts: Interrupts) -> TCPStore:
    if place.hosts_store:
        return host_store(place.host, place.port)
    wait_for_listener(place.host, place.port, MEET_SECONDS, interrupts.pause)
    return join_store(place.host, place.port)


def _hear(board: Board, nodes: int, interrupts: Interrupts) -> dict[int, dict[str, Any]]:
    """What every agent says of itself."""
    heard: dict[int, dict[str, Any]] = {}
    end = time.monotonic() + MEET_SECONDS
    while True:
        for node in set(range(nodes)) - heard.keys():
            if (found := board.decided(f"hello/{node}")) is not None:
                heard[node] = found
        if len(heard) == nodes:
            return heard
        if time.monotonic() > end:
            absent = sorted(set(range(nodes)) - heard.keys())
            raise RunFailedError(f"the agents of nodes {absent} did not come within {MEET_SECONDS:g} s")
        interrupts.pause(0.05)
