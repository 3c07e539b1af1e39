"""``dynatrain scale`` and ``drain`` on a real run: real agent, real ranks, and the numbers of a run left alone."""

import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from tests.cli import ROOT, dynatrain, environment
from tests.dist.paced import PACE

from dynatrain.data.order import batch_ids
from dynatrain.data.prepare import open_samples
from dynatrain.observe.log import Tail
from dynatrain.observe.run import RunFolder

MAIN = str(ROOT / "tests" / "dist" / "cli_main.py")
STEPS, BATCH, SEQUENCE, SEED = 3000, 4, 32, 3
CONFIG = f"""
layout = "fsdp2"
steps = {STEPS}
seed = {SEED}
[model]
dropout = 0.1
[data]
paths = ["text"]
tokenizer = "bytes"
sequence = {SEQUENCE}
[batch]
global_sequences = {BATCH}
micro_sequences = 1
[precision]
compute = "fp64"
"""

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(300)]


@contextmanager
def training(place, name):
    """A run that is being trained, slowly while its first rank 0 is there."""
    command = [sys.executable, MAIN, "paced:main", "train", "run.toml", "--run", name]
    process = subprocess.Popen(
        command,
        cwd=place,
        env=environment() | {PACE: "0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process, RunFolder(place / "runs" / name)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=30)


def steps_of(run):
    return [line for line in Tail(run.metrics).new() if line["kind"] == "step"]


def until(look, process, seconds=60):
    end = time.monotonic() + seconds
    while not (found := look()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


@pytest.fixture
def place(tmp_path):
    (tmp_path / "text").mkdir()
    for name in "ab":
        words = (f"{name}{number * number} to be or not to be, " for number in range(900))
        (tmp_path / "text" / f"{name}.txt").write_text("".join(words))
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def test_a_run_grows_shrinks_and_loses_its_rank_0_and_its_numbers_are_those_of_a_run_left_alone(place):
    with training(place, "moved") as (process, run):
        until(lambda: len(steps_of(run)) > 3, process)
        grown = dynatrain("scale", "moved", "3", cwd=place)
        assert grown.code == 0, grown
        # Eight steps of a world say what the way there has cost.
        until(lambda: sum(line["generation"] == 1 for line in steps_of(run)) > 10, process)
        drained = dynatrain("drain", "moved", "--rank", "0", cwd=place)
        assert drained.code == 0, drained
        until(lambda: steps_of(run)[-1]["generation"] > 1, process)
        last = until(lambda: len(steps_of(run)) and steps_of(run)[-1]["step"], process)
        until(lambda: steps_of(run)[-1]["step"] > last + 10, process)
        assert dynatrain("stop", "moved", cwd=place).code == 0
        process.communicate(timeout=30)
        assert process.returncode == 75
    with training(place, "alone") as (process, alone):
        until(lambda: len(steps_of(alone)) > 30, process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)

    moved, samples = steps_of(run), open_samples(run.path, SEQUENCE)
    assert [line["step"] for line in moved] == list(range(len(moved)))
    layouts = list(dict.fromkeys((line["generation"], line["layout"]) for line in moved))
    assert [layout for _, layout in layouts] == ["fsdp2", "fsdp3", "fsdp2"]
    for line in moved:
        assert line["samples"] == batch_ids(SEED, line["step"], BATCH, len(samples)).tolist()
    for one, other in zip(moved, steps_of(alone), strict=False):
        assert abs(one["loss"] - other["loss"]) <= 1e-12, (one, other)
    assert dynatrain("check", "moved", cwd=place).code == 0
    books = [json.loads((run.switch(number) / "certificate.json").read_text()) for number in (1, 2)]
    assert [book["outcome"] for book in books] == ["committed"] * 2
    assert all(book["lost_seconds"] is not None and book["lost_seconds"] < 60 for book in books), books
