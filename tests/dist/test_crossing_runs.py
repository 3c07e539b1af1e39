"""``dynatrain scale`` and ``drain`` on a real run: real agent, real ranks, and the numbers of a run left alone."""

import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest
from tests.cli import ROOT, dynatrain, environment
from tests.dist.paced import CLING, PACE

from dynatrain.app.runs import RunWorld
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
def training(place, name, *words, entry="paced:main", **env):
    """A run that is being trained, slowly while its first rank 0 is there."""
    command = [sys.executable, MAIN, entry, "train", "run.toml", "--run", name, *words]
    process = subprocess.Popen(
        command,
        cwd=place,
        env=environment() | {PACE: "0.1"} | env,
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
    with training(place, "moved", "--world.spares=1") as (process, run):
        until(lambda: len(steps_of(run)) > 3, process)
        (spare,) = until(lambda: [one for one in Tail(run.events).new() if one["kind"] == "newcomer"], process)
        time.sleep(1.0)  # for its first beat
        grown = dynatrain("scale", "moved", "3", cwd=place)
        assert grown.code == 0, grown
        assert spare["member"] in RunWorld.of(run).members
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


def test_a_run_grows_in_a_moment_however_often_and_however_those_before_have_left(place):
    (place / "run.toml").write_text(CONFIG.replace('layout = "fsdp2"', 'layout = "dp2.fsdp2"'))
    with training(place, "swings", **{CLING: "1"}) as (process, run):
        until(lambda: len(steps_of(run)) > 3, process)
        for size in (2, 4, 2, 4):
            scaled = dynatrain("scale", "swings", str(size), cwd=place)
            assert scaled.code == 0, scaled
            made = len(steps_of(run))
            until(lambda before=made: len(steps_of(run)) > before + 3, process)
        assert dynatrain("stop", "swings", cwd=place).code == 0
        process.communicate(timeout=60)
        assert process.returncode == 75
    events = Tail(run.events).new()
    stages = [event for event in events if event["kind"] == "crossing"]
    came = {event["world"]: event for event in stages if event["stage"] == "coming"}
    done = {event["world"]: event["time"] for event in stages if event["stage"] == "done"}
    took = {world: at - came[world]["time"] for world, at in done.items()}
    assert [came[world]["members"] for world in (1, 2, 3, 4)] == [[0, 1], [0, 1, 4, 5], [0, 1], [0, 1, 6, 7]]
    sys.stdout.write(f"seconds of each change: {[round(seconds, 2) for seconds in took.values()]}\n")
    assert max(took[2], took[4]) < 3.0
    killed = [event["member"] for event in events if event["kind"] == "overdue"]
    assert sorted(killed) == [2, 3, 4, 5]  # they were there until then, on the places of those that came
    assert [line["step"] for line in steps_of(run)] == list(range(len(steps_of(run))))


def test_hosts_come_and_go_and_the_numbers_are_those_of_a_run_left_alone(place):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        several = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    with ExitStack() as stack:
        first, run = stack.enter_context(training(place, "moved", RANK="0", **several))
        second, _ = stack.enter_context(training(place, "moved", RANK="1", **several))
        until(lambda: len(steps_of(run)) > 3, first)
        words = [sys.executable, "-m", "dynatrain", "join", "moved", "--ranks", "1", "--place", "third"]
        third = subprocess.Popen(words, cwd=place, env=environment(), stderr=subprocess.PIPE, text=True)
        stack.callback(third.kill)
        until(lambda: steps_of(run)[-1]["layout"] == "fsdp3", first)
        drained = dynatrain("drain", "moved", "--host", "1", "--deadline", "2m", cwd=place)
        assert drained.code == 0, drained
        assert "as in switch 1 of this run" in drained.out
        second.communicate(timeout=30)
        assert second.returncode == 0
        assert dynatrain("drain", "moved", "--host", "0", cwd=place).code == 2
        third.send_signal(signal.SIGTERM)
        assert (third.communicate(timeout=60), third.returncode)[1] == 0
        last = until(lambda: steps_of(run)[-1]["layout"] == "dp1" and steps_of(run)[-1]["step"], first)
        until(lambda: steps_of(run)[-1]["step"] > last + 10, first)
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=60)
        assert first.returncode == 75
    with training(place, "alone") as (process, alone):
        until(lambda: len(steps_of(alone)) > 30, process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    moved = steps_of(run)
    assert [line["step"] for line in moved] == list(range(len(moved)))
    layouts = list(dict.fromkeys((line["generation"], line["layout"]) for line in moved))
    assert [layout for _, layout in layouts] == ["fsdp2", "fsdp3", "fsdp2", "dp1"]
    for one, other in zip(moved, steps_of(alone), strict=False):
        assert abs(one["loss"] - other["loss"]) <= 1e-12, (one, other)
    assert dynatrain("check", "moved", cwd=place).code == 0
