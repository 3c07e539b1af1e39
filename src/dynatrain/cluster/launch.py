"""The face of this package for commands: run an agent in this process.

No torch at the top: the fork server is started first, and both import torch at the same time.
"""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType

from dynatrain.cluster.claim import Claim
from dynatrain.cluster.interrupts import Interrupts
from dynatrain.cluster.place import Device, Place, PlaceError, place_from, secret_from, share
from dynatrain.cluster.spawner import Spawner
from dynatrain.cluster.tenure import Tenure
from dynatrain.observe.address import Address
from dynatrain.observe.run import RunFolder

_NO_PRINTS: Mapping[str, str] = MappingProxyType({})

LIVENESS_SECONDS = 30.0
LEAVE_SECONDS = 10.0
DRAIN_SECONDS = 30.0
Resize = Callable[[str, int, str], str]
"""``(present layout, size, named layout or "") -> layout``; see :class:`~dynatrain.cluster.meeting.Job`."""


def announce_on_stderr(line: str) -> None:
    """Print a line for people where it does not mix with results."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def run_agent(
    run: RunFolder,
    entry: str,
    world_size: int,
    device: Device = "auto",
    *,
    liveness_seconds: float = LIVENESS_SECONDS,
    grace_seconds: float = 0.0,
    leave_seconds: float = LEAVE_SECONDS,
    drain_seconds: float = DRAIN_SECONDS,
    spares: int = 0,
    prints: Mapping[str, str] = _NO_PRINTS,
    interface: str = "",
    layout: str = "",
    resize: Resize | None = None,
    survives: bool = False,
    replacements: int = 0,
    take_up: Callable[[RunFolder, str], str] | None = None,
    take_over: bool = False,
    asked: AbstractContextManager[None] | None = None,
    announce: Callable[[str], None] = announce_on_stderr,
) -> int:
    """Start this node's ranks, watch them to their end, and leave no process behind. For the main thread.

    Alone on a machine this process hosts all ranks. Under ``torchrun --nproc-per-node=1`` it is one agent of several,
    and the run folder is on a disk that all of them share: node 0's agent keeps it, and every rank reads and writes it.

    Args:
        run: the run's folder.
        entry: ``package.module:function``; called in each rank with its
            :class:`~dynatrain.cluster.context.RankContext`. See :func:`dynatrain.cluster.forkserver.load`.
        world_size: ranks of all nodes together.
        device: ``auto``, ``cpu`` or ``cuda``.
        liveness_seconds: a rank without a sign of life for longer is lost.
        grace_seconds: time after SIGTERM in which ranks may still save.
        leave_seconds: time for ranks that have left the world to end by themselves; then they are killed.
        drain_seconds: time from SIGTERM on one host of several until that is taken away.
        spares: ranks that are kept ready on top of those that train.
        prints: fingerprints of what must be alike for all agents, also later ones, by what they are of.
        interface: of the network, on which other machines reach this run; empty for this machine alone, or for what the
            launcher says.
        layout: of the ranks, as text.
        resize: see :class:`~dynatrain.cluster.meeting.Job`; None where ranks do not come and go.
        survives: whether ``entry`` goes on without members that are lost; else a loss ends the run.
        replacements: how many of those are replaced.
        take_up: see :class:`~dynatrain.cluster.meeting.Job`; None where the run ends with the agent that leads.
        take_over: as in :meth:`~dynatrain.observe.run.RunFolder.claim`.
        asked: entered as soon as the run is claimed, left when it has ended, with the error where it could not begin.
        announce: takes lines for people.

    Returns:
        0 where every rank ended with 0, or where this host has left a run that goes on; 75 where they stopped saved; 3
        where the run failed; 130 or 143 after SIGINT or SIGTERM, with nothing saved.

    Raises:
        ValueError: the user's mistake (``RunError``, ``PlaceError``): the folder is taken or not writable, or the
            launch or the device is not possible. No rank was started.
    """
    _settle_resolver()
    place = place_from(os.environ, interface)
    if place.node == 0:  # whose number of ranks counts
        share(world_size, place)
    for setting, value in (("save.grace_seconds", grace_seconds), ("world.grace", drain_seconds)):
        if place.killed_after is not None and value > place.killed_after:
            announce(
                f"{setting} = {value:g}, but torchrun kills what is left {place.killed_after:g} s after SIGTERM. "
                f"Nearest: {place.killed_after:g}."
            )
    tenure, code = Tenure(run), 1
    attempt = tenure.take(take_over=take_over) if place.node == 0 else 0
    log = run.logs / "forkserver.log" if place.node == 0 else Path(os.devnull)
    try:
        with asked or nullcontext(), Interrupts() as interrupts, Spawner(entry, log) as spawner:
            from dynatrain.cluster.driving import drive  # noqa: PLC0415 - torch, imported while the server does the same
            from dynatrain.cluster.meeting import Job  # noqa: PLC0415 - the same

            job = Job(
                run=run,
                attempt=attempt,
                tenure=tenure,
                place=place,
                world_size=world_size,
                layout=layout,
                resize=resize or _no_other_size,
                device=device,
                liveness_seconds=liveness_seconds,
                grace_seconds=grace_seconds,
                leave_seconds=leave_seconds,
                drain_seconds=drain_seconds,
                spares=spares,
                prints=prints,
                secret=secret_from(os.environ),
                interface=interface,
                announce=announce,
                survives=survives,
                replacements=replacements,
                take_up=take_up,
            )
            code = drive(job, spawner, interrupts)
    except ValueError:
        code = 2
        raise
    finally:
        tenure.close(code)
    return code


def join_agent(
    run: RunFolder,
    entry: str,
    address: Address,
    claim: Claim,
    *,
    liveness_seconds: float = LIVENESS_SECONDS,
    grace_seconds: float = 0.0,
    leave_seconds: float = LEAVE_SECONDS,
    drain_seconds: float = DRAIN_SECONDS,
    interface: str = "",
    spares: int = 0,
    resize: Resize | None = None,
    replacements: int = 0,
    take_up: Callable[[RunFolder, str], str] | None = None,
    announce: Callable[[str], None] = announce_on_stderr,
) -> int:
    """Bring this machine to a run that has begun: it starts the ranks that the run has on it, until it leaves or ends.

    For the main thread. The run folder is on a disk that this machine shares with the others.

    Args:
        run: the run's folder, as this machine sees it.
        entry: as for :func:`run_agent`.
        address: where the run takes agents in.
        claim: what this agent says of itself; its devices are counted here.
        liveness_seconds: as for :func:`run_agent`.
        grace_seconds: as for :func:`run_agent`.
        leave_seconds: as for :func:`run_agent`.
        drain_seconds: as for :func:`run_agent`.
        interface: of the network, for this machine's ranks; empty for what torch finds.
        spares: as for :func:`run_agent`, should this agent come to lead.
        resize: likewise.
        replacements: likewise.
        take_up: likewise; with it, losses are survived as everywhere in the run.
        announce: takes lines for people.

    Returns:
        As :func:`run_agent`.

    Raises:
        ValueError: nobody is there, or the run does not take this agent in (``PlaceError``). No rank was started.
    """
    _settle_resolver()
    # Its number, and how the run is named in the store, are what it is told when it comes in.
    place = Place(node=0, nodes=1, host=address.host, port=address.port, nonce="")
    tenure, code = Tenure(run), 1
    with Interrupts() as interrupts, Spawner(entry, Path(os.devnull)) as spawner:
        from dynatrain.cluster.driving import drive  # noqa: PLC0415 - torch, imported while the server does the same
        from dynatrain.cluster.meeting import Job  # noqa: PLC0415 - the same

        job = Job(
            run=run,
            attempt=0,
            place=place,
            world_size=0,
            layout="",
            resize=resize or _no_other_size,
            device="auto",
            liveness_seconds=liveness_seconds,
            grace_seconds=grace_seconds,
            leave_seconds=leave_seconds,
            drain_seconds=drain_seconds,
            spares=spares,
            prints=claim.prints,
            secret=address.secret,
            interface=interface,
            claim=claim,
            announce=announce,
            tenure=tenure,
            survives=take_up is not None,
            replacements=replacements,
            take_up=take_up,
        )
        try:
            code = drive(job, spawner, interrupts)
        finally:
            tenure.close(code)
        return code


def _settle_resolver() -> None:
    """Keep torch from waiting for names.

    torch asks DNS for the name of every address it connects to, the loopback's too. Where no server answers, that would
    hold up each connection for 10 s; the answer is for torch's log only, and so may well be missing.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def _no_other_size(_layout: str, _size: int, _named: str) -> str:
    raise PlaceError("this run cannot change its size: whoever started it named no way to choose a layout")
