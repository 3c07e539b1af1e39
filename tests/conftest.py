"""What all tests share: one thread for torch, and a watchdog that says where everything hangs."""

import faulthandler
import os
import sys
import threading
from pathlib import Path

import hypothesis
import pytest

# Two cores are shared by all ranks of a test. Read by torch when it is imported, here or in a child process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch asks DNS for the names of addresses, the loopback's too; where no server answers, that would take 10 s each.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# The same examples every time, and no clock: what a busy machine does to an example says nothing about the code.
hypothesis.settings.register_profile("here", deadline=None, derandomize=True)
hypothesis.settings.load_profile("here")

SIGUSR1 = 10
"""A rank that catches it prints its stacks (``dynatrain.cluster.rank``)."""
MARGIN = 10.0
"""Seconds before pytest-timeout ends the test: enough to ask, and to read what was answered."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Watch one test with its fixtures."""
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker and marker.args else item.config.getini("timeout"))
    watchdog = threading.Timer(max(limit - MARGIN, limit / 2), _dump, [item.nodeid, limit])
    watchdog.daemon = True
    watchdog.start()
    try:
        return (yield)
    finally:
        watchdog.cancel()


def _dump(name: str, limit: float) -> None:
    """The stacks of this process, and of every rank below it."""
    out = sys.__stderr__
    out.write(f"\n{name} hangs; it is ended after {limit:g} s. The stacks of this process:\n")
    out.flush()
    faulthandler.dump_traceback(out, all_threads=True)
    ranks = [pid for pid in descendants(os.getpid()) if catches(pid, SIGUSR1)]
    before = {pid: _size(pid) for pid in ranks}
    for pid in ranks:
        os.kill(pid, SIGUSR1)
    threading.Event().wait(1.0)
    for pid in ranks:
        out.write(f"\nprocess {pid}:\n{_said_since(pid, before[pid])}\n")
    out.flush()


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; without one it would be killed by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def _size(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}/fd/2").stat().st_size
    except OSError:
        return 0


def _said_since(pid: int, size: int) -> str:
    """What a process has written to its standard error since it was ``size`` long, if that is a file."""
    try:
        path = Path(f"/proc/{pid}/fd/2").readlink()
        return path.read_bytes()[size:].decode(errors="replace") if path.is_file() else f"its stacks are in {path}"
    except OSError as error:
        return f"gone: {error}"
