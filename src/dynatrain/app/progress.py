"""Live progress of a run that this process drives, read from the run's own files: a bar on a terminal, lines elsewhere.

A thread of this process follows ``metrics.jsonl`` and ``events.jsonl``. It decides nothing and holds nothing up: the
agent runs in the main thread, and ranks only write files.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from statistics import median
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dynatrain.app.output import console, seconds
from dynatrain.app.runs import certificate
from dynatrain.app.switches import change_text
from dynatrain.observe.log import Tail
from dynatrain.observe.run import RunFolder

LOOK_SECONDS = 0.25
PRINTED_STEPS = 20
"""About how many step lines a whole run prints where there is no terminal."""


class View(Protocol):
    """Where progress is shown."""

    def line(self, text: str) -> None:
        """Something that stays."""

    def step(self, record: dict[str, Any], eta: str) -> None:
        """The newest step."""

    def close(self) -> None:
        """The end."""


class Plain:
    """Lines: one for every so many steps, and for the first in a layout.

    Args:
        where: takes the lines.
        steps: of the whole run.
    """

    def __init__(self, where: Console, steps: int) -> None:
        self._where = where
        self._steps = steps
        self._every = max(1, steps // PRINTED_STEPS)
        self._layout = ""

    def line(self, text: str) -> None:
        """Print at once: a pipe would hold it back."""
        self._where.print(text)
        self._where.file.flush()

    def step(self, record: dict[str, Any], eta: str) -> None:
        """Print it if its turn has come."""
        number = record["step"]
        if number % self._every == 0 or number == self._steps - 1 or record["layout"] != self._layout:
            self.line(f"{step_text(record, self._steps)}  ETA {eta}")
        self._layout = record["layout"]

    def close(self) -> None:
        """Nothing is open."""


class Live:
    """A bar with the newest step, and lines above it.

    Args:
        where: a terminal.
        steps: of the whole run.
    """

    def __init__(self, where: Console, steps: int) -> None:
        self._steps = steps
        self._bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            console=where,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=steps)
        self._bar.start()

    def line(self, text: str) -> None:
        """Print above the bar."""
        self._bar.console.print(text)

    def step(self, record: dict[str, Any], eta: str) -> None:
        """Move the bar."""
        text = f"{step_text(record, self._steps)}  ETA {eta}"
        self._bar.update(self._task, completed=record["step"] + 1, description=text, refresh=True)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()


def step_text(record: dict[str, Any], steps: int) -> str:
    """One step in a line."""
    return (
        f"step {record['step'] + 1:>{len(str(steps))}}/{steps}  loss {record['loss']:.4f}  "
        f"{record['tokens_per_second']:,.0f} tokens/s  {record['layout']}"
    )


def validation_text(record: dict[str, Any]) -> str:
    """One validation in a line, to as many digits as all layouts share."""
    return f"validation after {record['step'] + 1} steps: loss {record['loss']:#.6g}"


def redone_text(record: dict[str, Any]) -> str:
    """What is done again after a loss."""
    again = record["now"] - record["step"]
    return f"{again} step{'s' if again != 1 else ''} done again" if again else "no step is done again"


class Follower:
    """Shows what a run's files tell, as they grow.

    Args:
        run: its folder.
        steps: of the whole run.
        view: where to.
    """

    def __init__(self, run: RunFolder, steps: int, view: View) -> None:
        self._run = run
        self._steps = steps
        self._view = view
        self._metrics, self._events = Tail(run.metrics), Tail(run.events)
        for tail in (self._metrics, self._events):
            tail.new()  # of earlier attempts, where the run goes on
        self._recent: deque[float] = deque(maxlen=20)

    def look(self) -> None:
        """Show what is new."""
        for record in sorted([*self._events.new(), *self._metrics.new()], key=itemgetter("time")):
            if record["kind"] == "switch" and record["phase"] in {"committed", "aborted", "failed"}:
                self._view.line(self._switched(record))
            elif record["kind"] == "switch" and record["phase"] == "refused":
                said = f"{record['verb']} to {record['to']} refused: {record['reason']}"
                self._view.line(f"step {record['step']}: {said}")
            elif record["kind"] == "save" and record["outcome"] != "unchanged":
                how = "saved" if record["outcome"] == "done" else f"not saved: {record['message']}"
                self._view.line(f"step {record['step']}: {how}")
            elif record["kind"] == "loss":
                self._view.line(f"lost: {record['why']}; going on from step {record['step']}, {redone_text(record)}")
            elif record["kind"] == "validation":
                self._view.line(validation_text(record))
            elif record["kind"] == "step":
                self._recent.append(record["seconds"])
                self._view.step(record, self._eta(record["step"]))

    def _eta(self, step: int) -> str:
        left = round((self._steps - 1 - step) * median(self._recent))
        return (
            f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}" if left >= 3600 else f"{left // 60}:{left % 60:02d}"
        )

    def _switched(self, event: dict[str, Any]) -> str:
        record = certificate(self._run, event["switch"])
        if not record:
            return f"switch {event['switch']} {event['phase']}"
        how = f"stall {seconds(record['seconds']['stall'])}, digests equal"
        if record["outcome"] != "committed":
            how = event["reason"]
        return f"switch {record['switch']}: {change_text(record)} {record['outcome']}: {how}"


@contextmanager
def watch(run: RunFolder, steps: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show a run's progress while the block runs; gives a function that takes lines for people.

    Args:
        run: its folder.
        steps: of the whole run.
        quiet: standard output is for a program: everything goes to standard error.
    """
    where = console(error=quiet)
    terminal = (sys.stderr if quiet else sys.stdout).isatty()
    view: View = Live(where, steps) if terminal else Plain(where, steps)
    follower = Follower(run, steps, view)
    over = threading.Event()

    def follow() -> None:
        while not over.wait(LOOK_SECONDS):
            follower.look()

    thread = threading.Thread(target=follow, name="progress", daemon=True)
    thread.start()
    try:
        yield view.line
    finally:
        over.set()
        thread.join()
        follower.look()
        view.close()
