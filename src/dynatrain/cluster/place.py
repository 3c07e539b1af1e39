"""Where this agent stands among the nodes, and which devices its ranks get. The environment is read here alone."""

import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Device = Literal["auto", "cpu", "cuda"]


class PlaceError(ValueError):
    """A launch that cannot work; the text says what was found, the rule, and what would do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This agent among the agents of the run.

    Attributes:
        node: number of this agent; 0 reads the run's requests.
        nodes: number of agents.
        host: where the store listens.
        port: its port; 0 where this agent hosts it and the kernel chooses.
        nonce: names this run in the store: part of every key's prefix.
    """

    node: int
    nodes: int
    host: str
    port: int
    nonce: str

    @property
    def hosts_store(self) -> bool:
        """Whether this agent hosts the store. Under torchrun never: its own agent does."""
        return self.port == 0


def place_from(environment: Mapping[str, str]) -> Place:
    """Find out where this agent stands: alone on its machine, or one of several that torchrun has started.

    Args:
        environment: of the process.

    Raises:
        PlaceError: torchrun was called in a way that cannot work.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return Place(node=0, nodes=1, host="127.0.0.1", port=0, nonce=secrets.token_hex(8))
    problems = []
    if (local := environment.get("LOCAL_WORLD_SIZE", "1")) != "1":
        problems.append(f"--nproc-per-node={local}, but one agent a node starts its ranks: use --nproc-per-node=1")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        problems.append("torchrun does not share its store: unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    if problems:
        raise PlaceError("Bad launch: " + "; ".join(problems) + ".")
    restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Place(
        node=int(environment["RANK"]),
        nodes=int(environment["WORLD_SIZE"]),
        host=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
        nonce=f"{environment['TORCHELASTIC_RUN_ID']}.{restart}",
    )


def share(world_size: int, place: Place) -> range:
    """The ranks of this node: equally many on every node, because the planner and the floor count by machines.

    Raises:
        PlaceError: the ranks cannot be shared out equally.
    """
    each, left = divmod(world_size, place.nodes)
    if each < 1 or left:
        near = [f"{size} ranks" for size in (each * place.nodes, (each + 1) * place.nodes) if size]
        fewer = max(nodes for nodes in range(1, place.nodes + 1) if max(world_size, 1) % nodes == 0)
        raise PlaceError(
            f"{world_size} ranks on {place.nodes} nodes: every node needs equally many ranks, and at least one. "
            f"Nearest: {' or '.join(near)}; or {fewer} node{'s' if fewer > 1 else ''}."
        )
    return range(place.node * each, (place.node + 1) * each)


def choose_device(asked: Device, devices: Mapping[int, tuple[int, int]]) -> tuple[str, str]:
    """``cpu`` or ``cuda`` for the whole run, and a remark for people, which may be empty.

    Args:
        asked: ``auto`` takes CUDA where every rank of every node can have a device of its own.
        devices: ``(CUDA devices, ranks)`` of each node.

    Raises:
        PlaceError: CUDA was asked for and there are too few devices.
    """
    short = [f"node {node} has {have} for {need}" for node, (have, need) in devices.items() if have < need]
    some = any(have for have, _ in devices.values())
    if asked == "cpu":
        return "cpu", ""
    if not short:
        return "cuda", ""
    lack = f"every rank needs a CUDA device of its own; {', '.join(short)}"
    if asked == "cuda":
        raise PlaceError(f"device = 'cuda': {lack}. Nearest: fewer ranks, or device = 'cpu'.")
    return "cpu", f"on the CPU: {lack}" if some else ""


def wait_for_listener(host: str, port: int, timeout: float, pause: Callable[[float], None]) -> None:
    """Return as soon as somebody listens there.

    Tried here, before torch is asked to connect: torch waits for minutes, and cannot be interrupted in it.

    Args:
        host: where.
        port: its port.
        timeout: seconds.
        pause: sleeps between attempts; may raise to end the waiting.

    Raises:
        PlaceError: nobody did in time.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
        except OSError as error:
            if time.monotonic() >= end:
                raise PlaceError(
                    f"Nobody listens at {host}:{port} after {timeout:g} s ({error}). That is where torchrun said its "
                    "store is; check the rendezvous endpoint and that its host is up."
                ) from error
            pause(0.1)
        else:
            return
