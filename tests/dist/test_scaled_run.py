"""A real run under its agent grows and shrinks by the commands, and trains what a run of fixed size does."""

import json
import signal
import subprocess
import sys

import psutil
import pytest
from tests.cli import dynatrain, environment
from tests.dist.agents import until

from dynatrain.observe.log import Tail
from dynatrain.observe.run import RunFolder

CONFIG = """
layout = "fsdp2"
steps = 1500
device = "cpu"
[model]
config = "tiny"
[data]
paths = ["text"]
tokenizer = "bytes"
sequence = 32
validation = 0.0
[batch]
global_sequences = 6
micro_sequences = 1
[precision]
compute = "fp64"
[save]
at_end = false
[world]
max = 4
"""


def steps(run: RunFolder) -> list[dict]:
    return [line for line in Tail(run.metrics).new() if line["kind"] == "step"]


def begin(folder, name: str) -> tuple[subprocess.Popen, RunFolder]:
    command = [sys.executable, "-m", "dynatrain", "train", "run.toml", "--run", name]
    process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL)
    run = RunFolder(folder / "runs" / name)
    until(lambda: process.poll() is not None or len(steps(run)) > 3, 120)
    return process, run


@pytest.mark.sweep
def test_a_run_that_grows_and_loses_its_first_rank_trains_what_one_of_fixed_size_does(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("\n".join(f"{i} and {i} make {2 * i}" for i in range(9000)))
    (tmp_path / "run.toml").write_text(CONFIG)
    process, run = begin(tmp_path, "scaled")
    try:
        grown = dynatrain("scale", "scaled", "3", "--json", cwd=tmp_path)
        assert (grown.code, grown.record["outcome"]) == (0, "done"), grown
        assert grown.record["world"] == {"generation": 1, "size": 3, "members": [0, 1, 2]}
        assert grown.record["certificate"]["world"] == {"old": 2, "new": 3}
        same = dynatrain("scale", "scaled", "3", cwd=tmp_path)
        assert (same.code, same.out.startswith("unchanged")) == (0, True)
        assert dynatrain("scale", "scaled", "5", cwd=tmp_path).code == 2
        first = Tail(run.events).new()
        pids = next(event["pids"] for event in first if event["kind"] == "ranks_started")
        drained = dynatrain("drain", "scaled", "--rank", "0", "--json", cwd=tmp_path)
        assert (drained.code, drained.record["world"]["members"]) == (0, [1, 2]), drained
        assert not psutil.pid_exists(pids[0])
        seen = len(steps(run))
        until(lambda: len(steps(run)) > seen + 5)
        assert "2 ranks in world 2: members 1, 2" in dynatrain("status", "scaled", cwd=tmp_path).out
        assert dynatrain("stop", "scaled", cwd=tmp_path).code == 0
        assert process.wait(20) == 0
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
    lines = steps(run)
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert list(dict.fromkeys(line["layout"] for line in lines)) == ["fsdp2", "fsdp3", "fsdp2"]
    assert not [event for event in Tail(run.events).new() if event["kind"] in {"overdue", "run_failed"}]
    fixed, other = begin(tmp_path, "fixed")
    until(lambda: fixed.poll() is not None or len(steps(other)) >= len(lines), 120)
    dynatrain("stop", "fixed", cwd=tmp_path)
    fixed.wait(20)
    for line, expected in zip(lines, steps(other), strict=False):
        assert line["samples"] == expected["samples"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    sys.stdout.write(json.dumps([line["loss"] for line in lines[:: max(1, len(lines) // 8)]]) + "\n")
