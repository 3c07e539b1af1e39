"""How the agents of a run find each other and agree on what their ranks are told."""

import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from dynatrain.cluster.board import Board
from dynatrain.cluster.context import RankContext
from dynatrain.cluster.interrupts import Interrupts
from dynatrain.cluster.kernel import AGENT_PRIORITY, take_realtime
from dynatrain.cluster.place import Device, Place, choose_device, share, wait_for_listener
from dynatrain.cluster.store import host_store, join_store, prefix
from dynatrain.cluster.summons import Newcomer
from dynatrain.observe.mark import Lease
from dynatrain.observe.run import RunFolder

MEET_SECONDS = 60.0  # for the other agents to appear


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
        announce: takes lines for people.
        lease: on the run; None on other nodes than 0.
        survives: whether ranks go on, by themselves, without members that are lost.
        replacements: how many lost members are replaced, where there is room, over the whole attempt.
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
    announce: Callable[[str], None]
    lease: Lease | None = None
    survives: bool = False
    replacements: int = 0


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
    # Counted by NVML, without a CUDA context; and nothing is ever forked from this process.
    words = {"devices": torch.cuda.device_count(), "world_size": job.world_size, "attempt": job.attempt}
    board.post(f"hello/{job.place.node}", json.dumps(words))
    heard = _hear(board, job.place.nodes, interrupts)
    world_size, devices = heard[0]["world_size"], {node: word["devices"] for node, word in heard.items()}
    each = len(share(world_size, job.place))
    device, note = choose_device(job.device, {node: (have, each) for node, have in devices.items()})
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
    )


def first_world(job: Job, meeting: Meeting) -> tuple[Newcomer, ...]:
    """Every member of the first world and its place: equally many on every node."""
    each = len(share(meeting.world_size, job.place))
    return tuple(Newcomer(member=rank, node=rank // each, slot=rank % each) for rank in range(meeting.world_size))


def contexts(
    job: Job, meeting: Meeting, coming: Iterable[Newcomer], world: Sequence[int], *, generation: int = 0
) -> list[RankContext]:
    """What those are told who come to this node.

    Args:
        job: what is run.
        meeting: what the agents have in common.
        coming: to any node.
        world: members of their world, by rank.
        generation: of that world; 0 for the first, which nobody trains before.
    """
    each = len(share(meeting.world_size, job.place))
    return [
        RankContext(
            member=one.member,
            rank=world.index(one.member),
            local_rank=one.slot,
            world_size=len(world),
            # The first world's, also where later ones have other numbers: plans follow it, so all must know one.
            ranks_per_node=each if job.place.nodes > 1 else None,
            store_host=job.place.host,
            store_port=meeting.store.port,
            store_prefix=prefix(job.place.nonce),
            run=str(job.run.path),
            device=f"cuda:{one.slot}" if meeting.device == "cuda" else "cpu",
            backend=meeting.backend,
            generation=generation,
            attempt=meeting.attempt,
            realtime=meeting.realtime,
            joins=generation > 0,
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
        "device": meeting.device,
        "backend": meeting.backend,
        "realtime": meeting.realtime,
        "note": meeting.note,
    }


def _connect(place: Place, interrupts: Interrupts) -> TCPStore:
    if place.hosts_store:
        return host_store()
    wait_for_listener(place.host, place.port, MEET_SECONDS, interrupts.pause)
    return join_store(place.host, place.port)


def _hear(board: Board, nodes: int, interrupts: Interrupts) -> dict[int, dict[str, int]]:
    """What every agent says of itself."""
    heard: dict[int, dict[str, int]] = {}
    end = time.monotonic() + MEET_SECONDS
    while True:
        for node in set(range(nodes)) - heard.keys():
            text = board.peek(f"hello/{node}")
            if text is not None:
                heard[node] = json.loads(text)
        if len(heard) == nodes:
            return heard
        if time.monotonic() > end:
            absent = sorted(set(range(nodes)) - heard.keys())
            raise RunFailedError(f"the agents of nodes {absent} did not come within {MEET_SECONDS:g} s")
        interrupts.pause(0.05)
