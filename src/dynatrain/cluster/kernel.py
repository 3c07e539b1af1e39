"""The few Linux calls that Python has no name for, and the scheduling class of ranks and agent."""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

BESIDE_PRIORITY = 1
"""Of a rank's work beside training: it has what the threads that train leave over, before what is not real-time."""
RANK_PRIORITY = 2
AGENT_PRIORITY = 3
"""One above the ranks, so that a rank that spins cannot keep its agent from ending it."""


def signal_me_when_parent_ends(number: int) -> None:
    """Have the kernel send this process ``number`` when the thread that started it ends. Forgotten by a fork."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends, so that none can slip away."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def take_realtime(priority: int) -> bool:
    """Put this thread, and the threads it starts later, into the real-time class; False where that is not permitted.

    Why: the threads of gloo sleep and wake for every message, and in the normal class a thread that wakes waits for a
    time slice; small messages take milliseconds instead of a tenth of one.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(priority))
    except PermissionError:
        return False
    return True


def step_aside() -> None:
    """Let the threads that train go before this one, which is of a rank; else they would take turns of 0.1 s."""
    if os.sched_getscheduler(0) == os.SCHED_RR:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(BESIDE_PRIORITY))


@contextmanager
def aside() -> Iterator[None]:
    """As :func:`step_aside`, inside it alone."""
    realtime = os.sched_getscheduler(0) == os.SCHED_RR
    before = os.sched_getparam(0)
    step_aside()
    try:
        yield
    finally:
        if realtime:
            os.sched_setscheduler(0, os.SCHED_RR, before)


def leave_realtime() -> None:
    """Put this thread back into the normal class."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 40`` where the number has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
