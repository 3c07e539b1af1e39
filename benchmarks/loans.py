"""How long until lent ranks are back? ``python benchmarks/loans.py``: 4 -> 2 -> 4 -> 2 -> 4 ranks of one run.

Leavers are halted (SIGSTOP) as they leave, if they are still there, so that the agent has to kill them; newcomers take
their very places. Prints the seconds from each request to its answer, with those of the switch in it, the median step
of the two ranks while the newcomers prepare themselves, over that of steps before (wanted: at most 1.1), and the load
of the machine; writes ``loans.json``.
"""

import argparse
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import dynatrain
from dynatrain.observe.log import Tail

CONFIG = """
layout = "fsdp4"
steps = 1000000
[model]
config = "{model}"
[data]
paths = ["{text}"]
tokenizer = "bytes"
sequence = 64
validation = 0.0
[batch]
global_sequences = 4
micro_sequences = 1
"""


def lines(run, kind):
    return [line for line in Tail(run.events).new() if line["kind"] == kind]


def pids(run):
    """Process numbers by member."""
    first = lines(run, "ranks_started")[0]
    return dict(zip(first["ranks"], first["pids"], strict=True)) | {
        line["member"]: line["pid"] for line in lines(run, "newcomer")
    }


def halt(run, leavers, halted):
    """Stop the leavers as soon as their switch is committed."""
    committed = len([line for line in lines(run, "switch") if line["phase"] == "committed"])
    while len([line for line in lines(run, "switch") if line["phase"] == "committed"]) == committed:
        time.sleep(0.002)
    for pid in leavers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            halted.append(pid)


def beside(run):
    """The median step while the last newcomers came and prepared, over that of the twenty steps before."""
    asked = [line["time"] for line in lines(run, "crossing") if line["stage"] == "coming"][-1]
    moved = [line["time"] for line in lines(run, "switch") if line["phase"] == "committed"][-1]
    steps = [line for line in Tail(run.metrics).new() if line["kind"] == "step" and line["layout"] == "fsdp2"]
    before = [line["seconds"] for line in steps if line["time"] < asked][-20:]
    during = [line["seconds"] for line in steps if asked < line["time"] - line["seconds"] and line["time"] < moved]
    return statistics.median(during) / statistics.median(before), len(during)


def wait_for(run, layout):
    while Tail(run.metrics).new()[-1]["layout"] != layout:
        time.sleep(0.05)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--loans", type=int, default=2)
    arguments = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "text.txt").write_text("There is enough of it here. " * 5000, encoding="utf-8")
        (place / "run.toml").write_text(CONFIG.format(model=arguments.model, text=place / "text.txt"), encoding="utf-8")
        agent = dynatrain.RunAgent(place / "run.toml", run=place / "run")
        agent.start()
        run = agent.folder
        while len(Tail(run.metrics).new()) < 5:
            time.sleep(0.1)
        for _ in range(arguments.loans):
            members = [line["members"] for line in lines(run, "crossing") if line["stage"] == "done"]
            leavers = [pids(run)[member] for member in (members[-1] if members else range(4))[-2:]]
            halted = []
            thread = threading.Thread(target=halt, args=(run, leavers, halted))
            thread.start()
            agent.lend(count=2)
            thread.join()
            wait_for(run, "fsdp2")
            settled = len(Tail(run.metrics).new())
            while len(Tail(run.metrics).new()) < settled + 30:
                time.sleep(0.05)
            began = time.monotonic()
            answer = agent.reclaim()
            took = time.monotonic() - began
            record = json.loads((run.switch(answer.switch) / "certificate.json").read_text())
            wait_for(run, "fsdp4")
            ratio, steps = beside(run)
            found.append(
                {"seconds": took, "halted": len(halted), "switch": record["seconds"], "load": os.getloadavg()[0]}
                | {"step_ratio": ratio, "steps": steps}
            )
            phases = ", ".join(f"{phase} {value:.2f}" for phase, value in record["seconds"].items())
            print(
                f"2 -> 4 ranks in {took:.2f} s ({phases}); {len(halted)} leavers halted; "
                f"steps beside {ratio:.2f} of those before, {steps} of them; load {found[-1]['load']:.1f}"
            )
        agent.end()
    Path("loans.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
