"""Measure what a lost rank costs: ``python benchmarks/loss.py [--layout dp4.fsdp2] [--every 0] [--kills 3]``.

Each kill has a run of its own, by ``dynatrain train`` on CPUs: as soon as it has made some steps one of its ranks,
another each time, is killed by SIGKILL. With ``--every K`` ranks keep snapshots every K steps, and a run without them,
and without a kill, is measured beside. Writes ``loss.json``.

- next: seconds from the kill to the end of the next step that all survivors have finished, by the machine's clock;
  wanted is one second and one step.
- news: of these, from when rank 0 of the smaller world had come out and taken note, to the commit of the crossing.
- step: median seconds of a step before, and after in the smaller world.
- redone: steps done again; at most K where a keeper has what is lost.
- snapshots: bytes that ranks note and send, bytes a second while they do, and by how much the median step is longer
  than without them, in percent; wanted is at most one.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dynatrain.layout.text import parse_layout
from dynatrain.observe.log import Tail
from dynatrain.observe.run import RunFolder

BEFORE, AFTER = 12, 8
"""Steps before the kill, and behind it."""

CONFIG = """
layout = "{layout}"
steps = 100000
device = "cpu"
[model]
config = "{model}"
[batch]
global_sequences = 16
micro_sequences = 1
[data]
sequence = 64
[save]
at_end = false
[loss]
snapshot_steps = {every}
"""


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="tiny")
    options.add_argument("--layout", default="dp4.fsdp2")
    options.add_argument("--every", type=int, default=0)
    options.add_argument("--kills", type=int, default=3)
    asked = options.parse_args()
    rows = [measure(asked, number) for number in range(asked.kills)]
    result = {"model": asked.model, "layout": asked.layout, "every": asked.every, "rows": rows}
    if asked.every:
        plain = step_seconds(asked, every=0)
        kept = step_seconds(asked, every=asked.every)
        result["snapshots"] = kept | {
            "percent": 100 * (kept["step"] / plain["step"] - 1),
            "step_without": plain["step"],
        }
    text = json.dumps(result, indent=1)
    Path("loss.json").write_text(text + "\n")
    sys.stdout.write(text + "\n")


def measure(asked: argparse.Namespace, number: int) -> dict:
    """One kill."""
    ranks = parse_layout(asked.layout).world_size
    with started(asked, asked.every) as (process, run):
        until(lambda: len(steps(run)) >= BEFORE, process)
        rank = (ranks - 1 - number) % ranks
        pid = events(run, "ranks_started")[0]["pids"][rank]
        began = time.time()
        os.kill(pid, signal.SIGKILL)
        until(lambda: sum(line["generation"] > 0 for line in steps(run)) >= AFTER, process)
        (loss,) = events(run, "loss")
        lines = steps(run)
    old = [line["seconds"] for line in lines if line["generation"] == 0]
    new = [line for line in lines if line["generation"] > 0]
    return {
        "rank": rank,
        "next": new[0]["time"] - began,
        "news": loss["seconds"],
        "step": statistics.median(old[2:]),
        "step_after": statistics.median(line["seconds"] for line in new[2:]),
        "redone": loss["redone"]["steps"],
        "bytes": loss["bytes"],
        "to": new[0]["layout"],
    }


def step_seconds(asked: argparse.Namespace, *, every: int) -> dict:
    """The median step with snapshots every so many steps, and what these are."""
    with started(asked, every) as (process, run):
        until(lambda: len(steps(run)) >= 4 * BEFORE, process)
        lines, kept = steps(run), events(run, "snapshot")
    found = {"step": statistics.median(line["seconds"] for line in lines[BEFORE:])}
    if kept:
        sent = max(kept[0]["sent_bytes"])
        seconds = statistics.median(one["seconds"] for one in kept)
        found |= {"own_bytes": max(kept[0]["own_bytes"]), "sent_bytes": sent, "bytes_per_second": sent / seconds}
    return found


class started:  # noqa: N801 - reads as what it is
    """A run in a folder of its own, ended on leaving."""

    def __init__(self, asked: argparse.Namespace, every: int) -> None:
        self._place = tempfile.TemporaryDirectory()
        place = Path(self._place.name)
        text = CONFIG.format(layout=asked.layout, model=asked.model, every=every)
        (place / "run.toml").write_text(text)
        command = [sys.executable, "-m", "dynatrain", "train", "run.toml", "--run", "it"]
        self._process = subprocess.Popen(
            command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._run = RunFolder(place / "runs" / "it")

    def __enter__(self) -> tuple[subprocess.Popen, RunFolder]:
        return self._process, self._run

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.communicate(timeout=30)
        self._place.cleanup()


def steps(run: RunFolder) -> list[dict]:
    """All steps so far."""
    return [line for line in Tail(run.metrics).new() if line["kind"] == "step"]


def events(run: RunFolder, kind: str) -> list[dict]:
    """All events of a kind so far."""
    return [event for event in Tail(run.events).new() if event["kind"] == kind]


def until(look, process: subprocess.Popen, seconds: float = 300) -> None:
    """Return when ``look`` is true."""
    end = time.monotonic() + seconds
    while not look():
        if process.poll() is not None:
            raise SystemExit(process.communicate()[0])
        if time.monotonic() > end:
            raise SystemExit(f"nothing within {seconds} s")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
