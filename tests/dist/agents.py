"""Agents in processes of their own, for tests: start one, watch it, and see what it leaves behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dynatrain.observe.log import Tail
from dynatrain.observe.run import RunFolder

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "tests" / "dist" / "agent_main.py"
JOIN = MAIN.with_name("join_main.py")


def environment(**more: str) -> dict[str, str]:
    """Everything on the loopback; the source tree and the tests importable."""
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "GLOO_SOCKET_IFNAME": "lo",
        **more,
    }


def until(look: Callable[[], Any], seconds: float = 30.0) -> Any:
    """The first true result of ``look``; fails after ``seconds``."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, f"still {found!r} after {seconds} s"
        time.sleep(0.02)
    return found


@dataclass
class RunningAgent:
    """An agent's process and its run folder."""

    process: subprocess.Popen[str]
    run: RunFolder

    def events(self, kind: str) -> list[dict]:
        """All events of a kind so far."""
        return [event for event in Tail(self.run.events).new() if event["kind"] == kind]

    def pids(self) -> list[int]:
        """Process numbers of the ranks, once they are forked."""
        return until(lambda: self.events("ranks_started"))[0]["pids"]

    def until_training(self) -> list[int]:
        """Wait until every rank trains; returns their process numbers."""
        pids = self.pids()
        until(lambda: all(psutil.Process(pid).num_threads() > 3 for pid in pids))  # gloo's threads are there
        time.sleep(0.6)  # and a beat has told the agent so
        return pids

    def below(self) -> list[psutil.Process]:
        """Every process that the agent has brought about."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def send(self, number: signal.Signals) -> None:
        """Signal the agent alone."""
        self.process.send_signal(number)

    def end(self, seconds: float = 30.0) -> tuple[int, str, float]:
        """``(exit code, what it printed for people, seconds until it ended)``."""
        began = time.monotonic()
        _, said = self.process.communicate(timeout=seconds)
        return self.process.returncode, said, time.monotonic() - began


@contextmanager
def agent(
    folder: Path, entry: str, ranks: int = 2, liveness: float = 20.0, *before: str, main: Path = MAIN, **env: str
) -> Iterator[RunningAgent]:
    """An agent that runs ``entry``; killed with all that it started when the test is over.

    Args:
        folder: of the run.
        entry: ``module:function``, or the name of a function of ``toy``.
        ranks: world size.
        liveness: the agent's patience, in seconds.
        before: what is put in front of the command, for example torchrun.
        main: the agent's program.
        env: more environment.
    """
    what = (str(folder), entry if ":" in entry else f"tests.dist.toy:{entry}", str(ranks), str(liveness))
    command = [*(before or (sys.executable,)), str(main), *what]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(**env), stderr=subprocess.PIPE, text=True)
    running = RunningAgent(process, RunFolder(folder))
    below: list[psutil.Process] = []
    try:
        yield running
    finally:
        if process.poll() is None:
            below = running.below()
            process.kill()
        for left in below:
            if left.is_running():
                left.kill()
        process.communicate()


def gone(processes: list[psutil.Process], seconds: float = 3.0) -> bool:
    """Whether all have ended, at the latest after ``seconds``."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not alive


def listening(processes: list[psutil.Process]) -> set[int]:
    """The ports on which they listen."""
    return {c.laddr.port for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def open_ports() -> set[int]:
    """All ports of this machine on which somebody listens."""
    return {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
