"""What is left of the time where workers come and go? ``python benchmarks/goodput.py [--events 12] [--trace CSV]``.

One trace is replayed three times, each on a fresh folder, on CPUs of this machine:

- dynatrain: one ``dynatrain train``; a change with a warning is ``scale``, one without kills a rank by SIGKILL;
- restart: ``benchmarks/restarted.py`` under torchrun, plain FSDP2; a change with a warning saves and starts again at
  the new size, one without kills a rank by SIGKILL and starts again from the last checkpoint, of which there is one
  each Young-Daly interval;
- smallest: the same loop in the smallest world of the trace, from its begin to its end, undisturbed.

A trace is a CSV with the columns ``step`` (when that many steps are trained), ``size`` (of the world from there) and
``warned`` (0 or 1; without a warning only where the world loses one rank). The reference is LiveR's rate (47 changes
a day), compressed to a mean gap of 50 steps, a fifth of the losses without warning, between ``--smallest`` and
``--largest`` ranks; the same for the same ``--seed``.

Prints for each way samples that count per second of wall clock, goodput (the seconds that its steps take undisturbed,
each step counted once, over the wall clock), lost seconds per event, and samples trained again; writes
``goodput.json``.
"""

import argparse
import csv
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import dynatrain
from dynatrain.observe.log import Tail
from dynatrain.observe.run import RunFolder

SEQUENCES, LENGTH = 12, 64
GAP, UNWARNED = 50, 0.2
CONFIG = f"""
layout = "fsdp{{size}}"
steps = {{steps}}
device = "cpu"
[model]
config = "{{model}}"
dropout = 0.0
[batch]
global_sequences = {SEQUENCES}
micro_sequences = 1
[data]
sequence = {LENGTH}
validation = 0.0
[save]
at_end = false
[loss]
snapshot_steps = {{every}}
"""


@dataclass(frozen=True, kw_only=True)
class Event:
    """The world has ``size`` ranks from ``step`` on; ``warned`` of it, or not."""

    step: int
    size: int
    warned: bool


def main() -> None:
    """Replay, print, write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="tiny")
    options.add_argument("--events", type=int, default=12)
    options.add_argument("--smallest", type=int, default=2)
    options.add_argument("--largest", type=int, default=4)
    options.add_argument("--every", type=int, default=10, help="steps between dynatrain's snapshots")
    options.add_argument("--seed", type=int, default=47)
    options.add_argument("--trace", type=Path)
    asked = options.parse_args()
    trace = read(asked.trace) if asked.trace else reference(asked)
    steps, first = trace[-1].step + GAP, asked.largest
    with tempfile.TemporaryDirectory() as place:
        rows = {
            "dynatrain": measured(ours(Path(place) / "ours", asked, trace, first, steps), trace),
            "restart": measured(restarts(Path(place) / "restart", asked, trace, first, steps), trace),
            "smallest": measured(restarts(Path(place) / "least", asked, [], least(trace), steps), trace),
        }
    result = {"trace": [asdict(event) for event in trace], "steps": steps, "rows": rows}
    Path("goodput.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(f"{len(trace)} events in {steps} steps; load of the machine {os.getloadavg()[0]:.1f}\n")
    for name, row in rows.items():
        sys.stdout.write(f"{name:10s}" + "".join(f"  {key} {value:.4g}" for key, value in row.items()) + "\n")


def reference(asked: argparse.Namespace) -> list[Event]:
    """Changes at random, the same for the same seed."""
    chance, step, size, trace = random.Random(asked.seed), 0, asked.largest, []
    for _ in range(asked.events):
        step += max(20, round(chance.expovariate(1 / GAP)))
        new = chance.choice([other for other in range(asked.smallest, asked.largest + 1) if other != size])
        if warned := new > size or chance.random() >= UNWARNED:
            size = new
        else:
            size -= 1
        trace.append(Event(step=step, size=size, warned=warned))
    return trace


def read(path: Path) -> list[Event]:
    """A trace from a file."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Event(step=int(row["step"]), size=int(row["size"]), warned=row["warned"] == "1")
            for row in csv.DictReader(file)
        ]


def least(trace: list[Event]) -> int:
    """Ranks of the smallest world."""
    return min(event.size for event in trace)


def measured(lines: list[dict], trace: list[Event]) -> dict[str, float]:
    """Of the lines of all steps, in the order in which they were trained, those trained again among them."""
    steady = defaultdict(list)
    for line in lines:
        steady[line["ranks"]].append(line["seconds"])
    medians = {ranks: statistics.median(seconds) for ranks, seconds in steady.items()}
    last = {line["step"]: line for line in lines}  # the one that counts
    wall = lines[-1]["time"] - lines[0]["time"] + lines[0]["seconds"]
    useful = sum(medians[line["ranks"]] for line in last.values())
    return {
        "samples/s": len(last) * SEQUENCES / wall,
        "goodput": useful / wall,
        "lost seconds an event": (wall - useful) / len(trace),
        "samples again": (len(lines) - len(last)) * SEQUENCES,
        "wall": wall,
    }


def ours(place: Path, asked: argparse.Namespace, trace: list[Event], size: int, steps: int) -> list[dict]:
    """One run that goes on."""
    place.mkdir()
    text = CONFIG.format(size=size, steps=steps, model=asked.model, every=asked.every)
    (place / "run.toml").write_text(text)
    command = [sys.executable, "-m", "dynatrain", "train", "run.toml", "--run", "it"]
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = RunFolder(place / "runs" / "it")
    try:
        for event in trace:
            until(lambda event=event: trained(run.metrics) >= event.step, process)
            if event.warned:
                dynatrain.RunHandle(run.path).scale(event.size)
            else:
                world = [one for one in Tail(run.events).new() if one["kind"] == "crossing" and one["stage"] == "done"]
                os.kill(pids(run)[world[-1]["members"][-1] if world else size - 1], signal.SIGKILL)
        code = process.wait()
    finally:
        process.kill()
        said, _ = process.communicate()
    if code:
        raise SystemExit(said)
    sizes = {}  # of each generation
    for line in Tail(run.events).new():
        if line["kind"] == "crossing" and line["stage"] == "done":
            sizes[line["world"]] = len(line["members"])
    lines = [line for line in Tail(run.metrics).new() if line["kind"] == "step"]
    return [line | {"ranks": sizes.get(line["generation"], size)} for line in lines]


def pids(run: RunFolder) -> dict[int, int]:
    """Process numbers by member."""
    told = list(Tail(run.events).new())
    first = next(line for line in told if line["kind"] == "ranks_started")
    later = {line["member"]: line["pid"] for line in told if line["kind"] == "newcomer"}
    return dict(zip(first["ranks"], first["pids"], strict=True)) | later


def restarts(place: Path, asked: argparse.Namespace, trace: list[Event], size: int, steps: int) -> list[dict]:
    """A launcher for each world."""
    place.mkdir()
    lines = place / "steps.jsonl"
    for event in [*trace, None]:
        process = launched(place, asked, size, steps)
        if event is None:
            if process.wait():
                raise SystemExit(process.communicate()[0])
            break
        until(lambda event=event: lines.exists() and trained(lines) >= event.step, process)
        victim = process.pid if event.warned else int(ranks_of(process.pid)[-1])
        os.kill(victim, signal.SIGTERM if event.warned else signal.SIGKILL)
        process.communicate()
        size = event.size
    return [json.loads(line) for line in lines.read_text().splitlines()]


def launched(place: Path, asked: argparse.Namespace, size: int, steps: int) -> subprocess.Popen:
    """torchrun, on a port of its own."""
    script = Path(__file__).with_name("restarted.py")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", str(script)]
    words += ["--folder", str(place), "--model", asked.model, "--until", str(steps)]
    words += ["--between", str(GAP / UNWARNED), "--sequences", str(SEQUENCES), "--length", str(LENGTH)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ranks_of(launcher: int) -> list[str]:
    """Processes that a launcher has started."""
    return Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()


def trained(path: Path) -> int:
    """Steps that are trained and count."""
    if not path.exists():
        return 0
    steps = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return max((line["step"] + 1 for line in steps if line.get("kind", "step") == "step"), default=0)


def until(look, process: subprocess.Popen) -> None:
    """Return when ``look`` is true."""
    while not look():
        if process.poll() is not None:
            raise SystemExit(process.communicate()[0])
        time.sleep(0.02)


if __name__ == "__main__":
    main()
