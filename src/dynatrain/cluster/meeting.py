"""How the agents of a run find each other and agree on what their ranks are told."""

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed import PrefixStore, TCPStore

from dynatrain.cluster.board import Board
from dynatrain.cluster.context import RankContext
from dynatrain.cluster.interrupts import Interrupts
from dynatrain.cluster.kernel import AGENT_PRIORITY, take_realtime
from dynatrain.cluster.place import Device, Place, choose_device, share, wait_for_listener
from dynatrain.cluster.store import host_store, join_store, prefix
from dynatrain.observe.mark import Lease
from dynatrain.observe.run import RunFolder

GENERATION = 0  # a world does not change its members yet
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
        world_size: ranks of all nodes.
        device: what was asked for.
        liveness_seconds: silence after which a rank counts as lost.
        grace_seconds: time after SIGTERM in which ranks may still save.
        announce: takes lines for people.
        lease: on the run; None on other nodes than 0.
    """

    run: RunFolder
    attempt: int
    place: Place
    world_size: int
    device: Device
    liveness_seconds: float
    grace_seconds: float
    announce: Callable[[str], None]
    lease: Lease | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """What the agents have in common once they have met.

    Attributes:
        store: hosted here, or a connection to it.
        board: of this run's world.
        device: ``cpu`` or ``cuda``, on every node.
        backend: ``gloo`` or ``nccl``.
        realtime: whether this node's ranks run in the real-time class.
        attempt: number of the run's agent.
        note: a remark for people, or empty.
    """

    store: TCPStore
    board: Board
    device: str
    backend: str
    realtime: bool
    attempt: int
    note: str


def meet(job: Job, interrupts: Interrupts) -> Meeting:
    """Connect, wait for all agents, and choose the device for all of them alike.

    Raises:
        PlaceError: the user asked for what the machines, or this launch, cannot give.
        RunFailedError: an agent did not come.
        Interrupted: a signal came first.
    """
    store = _connect(job.place, interrupts)
    board = Board(PrefixStore(prefix(job.place.nonce, GENERATION), store), job.world_size)
    # Counted by NVML, without a CUDA context; and nothing is ever forked from this process.
    words = {"devices": torch.cuda.device_count(), "ranks": len(share(job.world_size, job.place))}
    board.post(f"hello/{job.place.node}", json.dumps({**words, "attempt": job.attempt}))
    heard = _hear(board, job.place.nodes, interrupts)
    device, note = choose_device(job.device, {n: (word["devices"], word["ranks"]) for n, word in heard.items()})
    return Meeting(
        store=store,
        board=board,
        device=device,
        backend="nccl" if device == "cuda" else "gloo",
        # Not beside a CUDA device: a rank that waits for one spins, and would keep everybody else off its core.
        realtime=device == "cpu" and take_realtime(AGENT_PRIORITY),
        attempt=heard[0]["attempt"],
        note=note,
    )


def contexts(job: Job, meeting: Meeting) -> list[RankContext]:
    """What this node's ranks are told."""
    mine = share(job.world_size, job.place)
    return [
        RankContext(
            rank=rank,
            local_rank=rank - mine.start,
            world_size=job.world_size,
            ranks_per_node=len(mine) if job.place.nodes > 1 else None,
            store_host=job.place.host,
            store_port=meeting.store.port,
            store_prefix=prefix(job.place.nonce, GENERATION),
            run=str(job.run.path),
            device=f"cuda:{rank - mine.start}" if meeting.device == "cuda" else "cpu",
            backend=meeting.backend,
            generation=GENERATION,
            attempt=meeting.attempt,
            realtime=meeting.realtime,
        )
        for rank in mine
    ]


def describe(job: Job, meeting: Meeting) -> dict[str, object]:
    """The fields of the event ``agent_started``."""
    return {
        "node": job.place.node,
        "nodes": job.place.nodes,
        "host": socket.gethostname(),
        "world_size": job.world_size,
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
