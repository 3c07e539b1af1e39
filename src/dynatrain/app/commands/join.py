"""``dynatrain join RUN | HOST:PORT --run RUN``."""

import os
import re
import socket
from functools import partial
from typing import Annotated

import tyro

from dynatrain.app.cli import call
from dynatrain.app.mistake import MistakeError
from dynatrain.app.output import emit
from dynatrain.app.prints import prints_of
from dynatrain.app.resize import layout_of_size
from dynatrain.app.resume import take_up
from dynatrain.app.runs import config_of, find_run
from dynatrain.app.start import ENTRY, entry_of, grace_of
from dynatrain.cluster.claim import Claim
from dynatrain.cluster.launch import join_agent
from dynatrain.observe.address import Address
from dynatrain.observe.prints import print_of
from dynatrain.observe.run import RunFolder
from dynatrain.observe.versions import require_tested, versions
from dynatrain.space.run_check import check_run

Where = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|HOST:PORT")]


def run(words: list[str]) -> int:
    """The command."""
    return call(join, words)


def join(
    where: Where,
    /,
    *,
    run: str = "",
    ranks: int = 0,
    place: str = "",
    interface: str = "",
    json: bool = False,
) -> int:
    """Bring this machine to a running run, as a place for ranks, until it is drained or the run ends.

    The run's folder is on a disk that all machines share. It tells where the run listens, and the token that proves
    that this machine belongs to it; where HOST:PORT is given, the token is in DYNATRAIN_TOKEN. Code, versions,
    configuration and model have to be those of the run; else it is not taken in, and the run goes on untouched.

    Exit codes: 0 this machine has left, or the run has ended well; 2 it was not taken in; 3 the run failed; 75 the run
    stopped and was saved; 130 Ctrl-C; 143 SIGTERM with nothing saved.

    Args:
        where: the run's name or folder; or where its store listens.
        run: the run's folder, with HOST:PORT.
        ranks: by how many ranks the run is to grow for it, as far as layouts allow; by default none, until scale asks.
        place: name of the place that it takes; of one name there is one agent. By default this machine's name.
        interface: network interface that its ranks use; by default the run's own setting.
        json: print one JSON object at the end.
    """
    folder = find_run(run or where)
    address = _address(folder, where if run else "")
    checked = check_run(config_of(folder))
    require_tested(versions())
    if ranks < 0:
        raise MistakeError(f"--ranks={ranks}: 0 for a place that is kept, or by how many ranks the run is to grow.")
    claim = Claim(
        place=place or socket.gethostname(),
        host=socket.gethostname(),
        pid=os.getpid(),
        devices=0,
        ranks=ranks,
        prints=prints_of(checked) | {"config": print_of([folder.config.read_bytes()])},
    )
    world = checked.config.world
    code = join_agent(
        folder,
        entry_of(checked.config, ENTRY),
        address,
        claim,
        grace_seconds=grace_of(checked.config),
        drain_seconds=world.grace,
        interface=interface or world.interface,
        spares=world.spares,
        resize=partial(layout_of_size, checked),
        replacements=checked.config.loss.replacements,
        take_up=take_up,
    )
    if json:
        emit({"run": str(folder.path), "place": claim.place, "exit": code})
    return code


def _address(folder: RunFolder, where: str) -> Address:
    """Where to knock, and with what.

    Args:
        folder: of the run.
        where: ``HOST:PORT``; empty for what the folder says.

    Raises:
        MistakeError: that is not known.
    """
    if not where:
        found = Address.read(folder.path)
        if found is None:
            raise MistakeError(
                f"Run {folder.name} takes in nobody: {folder.path}/join.json is not there, or not readable for this "
                f"user; see dynatrain status {folder.name}. Or name HOST:PORT, with --run and DYNATRAIN_TOKEN."
            )
        return found
    match = re.fullmatch(r"(?P<host>[^:/\s]+):(?P<port>\d{1,5})", where)
    secret = os.environ.get("DYNATRAIN_TOKEN", "")
    if match is None:
        raise MistakeError(f"{where!r} is no HOST:PORT, for example 10.0.0.7:29400.")
    if not secret:
        raise MistakeError("HOST:PORT needs the run's token in DYNATRAIN_TOKEN; dynatrain join RUN reads it itself.")
    return Address(host=match["host"], port=int(match["port"]), secret=secret)
