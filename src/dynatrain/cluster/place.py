"""Where this agent stands among the nodes, and which devices its ranks get. The environment is read here alone."""

import fcntl
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Device = Literal["auto", "cpu", "cuda"]
TORCHRUN_SECONDS = 30.0
"""torchrun's ``shutdown_timeout``: from the signal that it passes on to SIGKILL."""
_SIOCGIFADDR = 0x8915  # Linux's number of the question for an interface's address


class PlaceError(ValueError):
    """A launch that cannot work; the text says what was found, the rule, and what would do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This agent among the agents of the run.

    Attributes:
        node: number of this agent; 0 reads the run's requests.
        nodes: number of agents.
        host: where the store listens.
        port: its port; 0 for one that the kernel chooses.
        nonce: names this run in the store: part of every key's prefix.
        hosts_store: whether this agent hosts it. Under torchrun none does: torchrun's own agent does.
        killed_after: seconds from the signal that the launcher passes on until it kills what is left; None where no
            launcher does.
    """

    node: int
    nodes: int
    host: str
    port: int
    nonce: str
    hosts_store: bool = False
    killed_after: float | None = None


_SEVERAL = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
"""What torch's ``env://`` is told by whoever starts one process on each node."""


def place_from(environment: Mapping[str, str], interface: str = "") -> Place:
    """Find out where this agent stands: alone, or one of several, started by torchrun or each by itself.

    Of several that start each by itself, ``RANK`` of ``WORLD_SIZE`` is the number of the agent, and 0 hosts the store
    at ``MASTER_ADDR:MASTER_PORT``, as torch's ``env://`` has it.

    Args:
        environment: of the process.
        interface: of the network, on which a lone agent listens; empty for this machine alone.

    Raises:
        PlaceError: the launch cannot work, or there is no such interface.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return _under_torchrun(environment)
    if all(name in environment for name in _SEVERAL) and environment["WORLD_SIZE"] != "1":
        return _one_of_several(environment)
    host = address_of(interface) if interface else "127.0.0.1"
    return Place(node=0, nodes=1, host=host, port=0, nonce=secrets.token_hex(8), hosts_store=True)


def _one_of_several(environment: Mapping[str, str]) -> Place:
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not environment[name].isdecimal():
            raise PlaceError(f"Bad launch: {name}={environment[name]!r} is no number.")
        numbers[name] = int(environment[name])
    node, nodes = numbers["RANK"], numbers["WORLD_SIZE"]
    if node >= nodes:
        raise PlaceError(f"Bad launch: RANK={node} of WORLD_SIZE={nodes}; agents are numbered from 0 to {nodes - 1}.")
    return Place(
        node=node,
        nodes=nodes,
        host=environment["MASTER_ADDR"],
        port=numbers["MASTER_PORT"],
        nonce="run",  # the store is the first agent's own, and ends with it
        hosts_store=node == 0,
    )


def _under_torchrun(environment: Mapping[str, str]) -> Place:
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
        killed_after=TORCHRUN_SECONDS,
    )


def secret_from(environment: Mapping[str, str]) -> str:
    """What proves that an agent belongs to the run: ``DYNATRAIN_TOKEN``, or one that is thought of now."""
    return environment.get("DYNATRAIN_TOKEN") or secrets.token_hex(16)


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface.

    Raises:
        PlaceError: there is none of that name, or it has no address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise PlaceError(
                f"world.interface = {interface!r} has no IPv4 address ({error.strerror}). Nearest: one of {names}."
            ) from None
    return socket.inet_ntoa(found[20:24])


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
                    f"Nobody listens at {host}:{port} after {timeout:g} s ({error}). That is where the run's store was "
                    "said to be; check the address and that its host is up."
                ) from error
            pause(0.1)
        else:
            return
