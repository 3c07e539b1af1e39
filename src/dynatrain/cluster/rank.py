"""The life of a rank's process, from the fork to its exit code."""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from dynatrain.cluster.context import RankContext
from dynatrain.cluster.kernel import RANK_PRIORITY, signal_me_when_parent_ends, take_realtime

STACKS = signal.SIGUSR1
"""A rank that gets this signal prints the stacks of all its threads to its log and goes on."""

Entry = Callable[[RankContext], int | None]
"""What a rank runs; what it returns is the exit code, None for 0."""

_WORDS = 8000  # bytes of error text: the pipe holds 64 KiB, and nobody reads before the rank has ended


def live(entry: Entry, context: RankContext, *, parent: int, words: int) -> NoReturn:
    """Run a rank in this freshly forked process, then end the process; never returns.

    Args:
        entry: what the rank does. An exception out of it ends the rank with code 1.
        context: its place.
        parent: process number of the fork server.
        words: descriptor for the error text that the agent is to show. A pipe and not the store: the store may be what
            has failed.
    """
    code = 1
    try:
        _settle(context, parent)
        code = entry(context) or 0
    except SystemExit as leaving:
        if isinstance(leaving.code, int | None):
            code = leaving.code or 0
        else:  # sys.exit("why")
            _tell(words, str(leaving.code))
            sys.stderr.write(f"{leaving.code}\n")
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is reported, then the process ends
        _tell(words, "".join(traceback.format_exception_only(error)).strip())
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # a full disk
                stream.flush()
        # No interpreter shutdown: destructors of process groups would wait for peers that may be gone.
        os._exit(code & 0xFF)


def _tell(words: int, text: str) -> None:
    """Leave the last words of this rank for the agent, with their time."""
    spoken = time.monotonic()
    cut = text.encode(errors="backslashreplace")[:_WORDS].decode(errors="ignore")
    os.write(words, json.dumps({"words": cut, "spoken": spoken}).encode())


def _settle(context: RankContext, parent: int) -> None:
    """Make the process a rank: its own session, log and signals; bound to its parent's life."""
    os.setsid()  # Ctrl-C reaches the agent alone
    signal_me_when_parent_ends(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the line above
    _print_to(context)
    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)
    _leave_ending_to_the_agent()
    if context.realtime:
        take_realtime(RANK_PRIORITY)  # before the first thread: threads inherit it


def _print_to(context: RankContext) -> None:
    log = os.open(context.folder.log(context.member), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _leave_ending_to_the_agent() -> None:
    """Let SIGINT and SIGTERM pass: a scheduler sends them to all processes, and the agent asks at a step edge.

    Helpers that the rank forks end on them as usual.
    """
    rank = os.getpid()

    def pass_by(number: int, _: FrameType | None) -> None:
        if os.getpid() != rank:
            os._exit(128 + number)

    signal.signal(signal.SIGINT, pass_by)
    signal.signal(signal.SIGTERM, pass_by)
