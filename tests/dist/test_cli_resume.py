"""The command line around runs that are saved, stopped, killed, and gone on with; real agents and real ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import chain

import pytest
from tests.cli import ROOT, dynatrain, environment
from tests.dist.paced import PACE
from tests.dist.trained import SHAPE

from dynatrain.data.order import batch_ids
from dynatrain.data.prepare import open_samples
from dynatrain.execute.dcp_folder import DcpFolder
from dynatrain.observe.checkpoints import MANIFEST, Manifest, checkpoints, damaged, newest
from dynatrain.observe.log import Tail
from dynatrain.observe.requests import Request, new_id, submit
from dynatrain.observe.run import RunFolder
from dynatrain.space.hf_config import written_config

MAIN = str(ROOT / "tests" / "dist" / "cli_main.py")
STEPS, BATCH, SEQUENCE, SEED = 64, 4, 32, 3
CONFIG = f"""
layout = "fsdp2"
steps = {STEPS}
seed = {SEED}
[model]
config = "model.json"
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
[save]
every = 8
keep_last = 99
"""

pytestmark = pytest.mark.timeout(200)


@contextmanager
def training(place, name, *words):
    """A run that is being trained, slowly: its process and its folder."""
    command = [sys.executable, MAIN, "paced:main", "train", "run.toml", "--run", name, *words]
    process = subprocess.Popen(
        command,
        cwd=place,
        env=environment() | {PACE: "0.08"},
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


def until(look, process, seconds=60):
    end = time.monotonic() + seconds
    while not (found := look()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def steps_of(run):
    """Every line of a step: those that were trained twice stand twice."""
    return [line for line in Tail(run.metrics).new() if line["kind"] == "step"]


def kept(run):
    """Of each step the line of the last attempt that trained it."""
    return list({line["step"]: line for line in steps_of(run)}.values())


def of_one_step(folder, layout, ranks):
    """A checkpoint whose every part says that it is of one step and one world; its step."""
    manifest = Manifest.read(folder)
    assert damaged(folder, manifest.files) == ()
    assert (manifest.layout, manifest.world_size) == (layout, ranks)
    held = DcpFolder(folder)
    counters = [key for key in held.shapes if key.startswith("optim.state.") and key.endswith(".step")]
    assert counters
    assert {held.stored(key)[0].tensor.item() for key in counters} == {float(manifest.step)}
    assert {key for key in held.objects if key.startswith("streams.")} == {f"streams.{n}" for n in range(ranks)}
    account = held.read("dynatrain")
    assert (account["step"], account["layout"]) == (manifest.step, layout)
    assert account["objects"]["schedule"]["last_epoch"] == manifest.step
    return manifest.step


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with text, a configuration, a run that never stopped, and one that was stopped, killed and damaged."""
    path = tmp_path_factory.mktemp("place")
    (path / "text").mkdir()
    for name in "ab":
        words = (f"{name}{number * number} to be or not to be, " for number in range(900))
        (path / "text" / f"{name}.txt").write_text("".join(words))
    (path / "model.json").write_text(json.dumps(written_config(asdict(SHAPE) | {"vocab_size": 257})))
    (path / "run.toml").write_text(CONFIG)
    assert dynatrain("train", "run.toml", "--run", "plain", cwd=path).code == 0
    return path


def test_a_run_goes_on_after_sigterm_and_after_a_kill_as_if_nothing_had_been(place):
    with training(place, "cut") as (process, run):
        until(lambda: len(steps_of(run)) > 3, process)
        asked = dynatrain("save", "cut", "--json", cwd=place)
        assert (asked.code, asked.record["outcome"]) == (0, "done")
        assert Manifest.read(place / asked.record["message"]).step > 3
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
        assert process.returncode == 75, said
    stopped = len(steps_of(run))
    assert 3 < stopped < STEPS
    assert of_one_step(newest(run.checkpoints)[0], "fsdp2", 2) == stopped

    with training(place, "cut", "--layout", "fsdp2.tp2") as (process, run):
        until(lambda: steps_of(run)[-1]["step"] > stopped + 1, process)
        said = dynatrain("prepare", "cut", "pp2.tp2", cwd=place)
        assert (said.code, said.out.startswith("cut: done, pp2.tp2 is ready and holds up to ")) == (0, True)
        assert "; pp2.tp2 is ready, " in dynatrain("status", "cut", cwd=place).out
        for verb, arguments in (("save", {}), ("switch", {"layout": "pp2.tp2"}), ("save", {})):
            submit(run.requests, Request(id=new_id(), verb=verb, arguments=arguments))
        until(lambda: {"pp2.tp2"} == {Manifest.read(p).layout for p in checkpoints(run.checkpoints)[-1:]}, process)
        *_, ranks = (event["pids"] for event in Tail(run.events).new() if event["kind"] == "ranks_started")
        assert len(ranks) == 4
        for rank in ranks:
            with suppress(ProcessLookupError):  # the agent ends the others soon
                os.kill(rank, signal.SIGKILL)
        said, _ = process.communicate(timeout=30)
        assert process.returncode == 3, said
        assert f"going on from step {stopped}" in said
    killed = steps_of(run)[-1]["step"] + 1
    assert killed < STEPS
    layouts = {}
    for folder in checkpoints(run.checkpoints):
        manifest = Manifest.read(folder)
        layouts.setdefault(manifest.layout, []).append(
            of_one_step(folder, manifest.layout, 2 if manifest.layout == "fsdp2" else 4)
        )
    assert list(layouts) == ["fsdp2", "fsdp2.tp2", "pp2.tp2"]

    good, _ = newest(run.checkpoints)
    for step in (STEPS - 2, STEPS - 1):
        shutil.copytree(good, run.checkpoints / f"step_{step:08d}")
    shard = run.checkpoints / f"step_{STEPS - 2:08d}" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    (run.checkpoints / f"step_{STEPS - 1:08d}" / MANIFEST).unlink()
    said = dynatrain("train", "run.toml", "--run", "cut", "--layout", "dp1", cwd=place)
    assert said.code == 0, said
    assert f"going on from step {Manifest.read(good).step} ({good}), saved in pp2.tp2, in dp1" in said.out
    assert f"step_{STEPS - 1:08d}: not complete, it has no {MANIFEST}" in said.out
    assert f"step_{STEPS - 2:08d}: __1_0.distcp has" in said.out

    plain, cut = steps_of(RunFolder(place / "runs" / "plain")), kept(run)
    assert [line["step"] for line in cut] == list(range(STEPS)) == [line["step"] for line in plain]
    assert len({line["layout"] for line in cut}) == 4
    assert [line["attempt"] for line in cut] == sorted(line["attempt"] for line in cut)
    for one, other in zip(cut, plain, strict=True):
        assert one["samples"] == other["samples"]
        assert one["lr"] == other["lr"]
        assert one["loss"] == pytest.approx(other["loss"], rel=0, abs=1e-12)
    assert [line["loss"] for line in cut[:stopped]] == [line["loss"] for line in plain[:stopped]]
    ids = list(chain(*(line["samples"] for line in cut)))
    count = len(open_samples(run.path, SEQUENCE))
    assert len(set(ids)) == len(ids) <= count
    assert ids == list(chain(*(batch_ids(SEED, step, BATCH, count).tolist() for step in range(STEPS))))


def test_a_run_that_is_over_is_not_begun_again(place):
    events = (place / "runs" / "plain" / "events.jsonl").read_text()
    said = dynatrain("train", "run.toml", "--run", "plain", "--layout", "tp2", cwd=place)
    assert said.code == 0
    assert f"all {STEPS} steps are trained already" in said.out
    assert (place / "runs" / "plain" / "events.jsonl").read_text() == events, "no rank was started"


def test_what_cannot_go_on_is_refused_with_code_2(place):
    config = (place / "runs" / "plain" / "config.toml").read_text()
    for words, expected in {
        ("--fresh",): "There is a run at",
        ("--optimizer.lr=0.5", "--seed=4"): "optimizer.lr was 0.001 and is now 0.5\n  - seed was 3 and is now 4",
        ("--data.tokenizer=bpe",): "data.tokenizer was 'bytes' and is now 'bpe'",
        (f"--steps={STEPS - 1}",): f"has trained {STEPS} steps; steps = {STEPS - 1} is fewer",
        ("--layout=fsdp3.tp3",): "fsdp3.tp3",
    }.items():
        said = dynatrain("train", "run.toml", "--run", "plain", *words, cwd=place)
        assert said.code == 2
        assert expected in said.err
    assert (place / "runs" / "plain" / "config.toml").read_text() == config
    shutil.copytree(place / "runs" / "plain", place / "runs" / "bare")
    shutil.rmtree(place / "runs" / "bare" / "checkpoints")
    said = dynatrain("train", "run.toml", "--run", "bare", "--steps=90", cwd=place)
    assert said.code == 2
    assert "no checkpoint that it could go on from" in said.err
    assert dynatrain("save", "plain", cwd=place).code == 2


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.sweep
def test_a_run_whose_last_save_fails_does_not_end_as_if_it_were_saved(place, stops):
    with training(place, f"full-{stops}", "--save.every=0", "--steps=12") as (process, run):
        until(lambda: run.metrics.exists() and steps_of(run), process)
        run.checkpoints.touch()  # no folder can be made there
        if stops:
            submit(run.requests, Request(id=new_id(), verb="stop"))
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 3, said
    assert "the last one, is not saved" in said
    assert "run_failed" in {event["kind"] for event in Tail(run.events).new()}
