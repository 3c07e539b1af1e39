"""The command line around a run: a real agent and real ranks, which sleep instead of training."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli import ROOT, dynatrain, environment, switch_rows

from dynatrain.app.output import size
from dynatrain.observe.log import Tail

MAIN = str(ROOT / "tests" / "dist" / "cli_main.py")
CONFIG = """
layout = "dp2"
steps = {steps}
seed = {seed}
[data]
paths = ["text"]
tokenizer = "bytes"
[[switch]]
step = 5
layout = "tp2"
"""


@pytest.fixture
def place(tmp_path):
    """A folder with a little text and a configuration."""
    (tmp_path / "text").mkdir()
    for name in "ab":
        (tmp_path / "text" / f"{name}.txt").write_text("To be, or not to be. " * 400)
    (tmp_path / "short.toml").write_text(CONFIG.format(steps=20, seed=0))
    return tmp_path


def train(place, *words, entry="train"):
    """A run to its end."""
    return dynatrain("train", *words, cwd=place, before=(MAIN, f"cli_toy:{entry}"))


@contextmanager
def training(place, seed=0):
    """A run called ``long`` that would take minutes; ends with the block."""
    (place / "long.toml").write_text(CONFIG.format(steps=20_000, seed=seed))
    command = [sys.executable, MAIN, "cli_toy:train", "train", "long.toml", "--run", "long"]
    process = subprocess.Popen(
        command, cwd=place, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = Tail(place / "runs" / "long" / "metrics.jsonl")
    end = time.monotonic() + 60
    while process.poll() is None and not any(one["step"] > 8 for one in metrics.new()) and time.monotonic() < end:
        time.sleep(0.05)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def test_a_run_is_shown_in_lines_and_can_be_looked_at_afterwards(place):
    said = train(place, "short.toml", "--run", "one", "--optimizer.lr=2e-3")
    assert said.code == 0, said
    lines = said.out.splitlines()
    assert any(line.startswith("step  1/20  loss 8.3000  ") and line.endswith("ETA 0:00") for line in lines)
    assert any("  tp2  " in line for line in lines)
    assert "switch 1: dp2 -> tp2 committed: stall 30 ms, digests equal" in lines
    assert "check it:  dynatrain check one" in lines
    plan = json.loads((place / "runs" / "one" / "switches" / "001" / "plan.json").read_text())
    parts = [size(plan["bytes"][kind]) for kind in ("moved", "relaid", "adopted")]
    row = ["1", "dp2 -> tp2", "5 steps", "committed", *parts, "30 ms", "50 ms", "10 ms", "yes"]
    assert switch_rows(said.out) == [row]
    run = place / "runs" / "one"
    assert "lr = 0.002" in (run / "config.toml").read_text()
    assert str(place / "text") in (run / "config.toml").read_text()
    assert json.loads((run / "environment.json").read_text())["versions"]["torch"].startswith("2.13")
    assert (run / "tokenizer.json").exists()
    assert "ended with code 0" in dynatrain("status", cwd=place).out
    assert "agent_ended" in dynatrain("events", "one", cwd=place).out
    assert "1  dp2 -> tp2" in dynatrain("history", "one", cwd=place).out
    assert dynatrain("stop", "one", cwd=place).code == 0
    checked = dynatrain("check", "one", "--json", cwd=place)
    assert checked.code == 0
    assert checked.record["sound"]


def test_a_damaged_run_does_not_pass_the_check(place):
    assert train(place, "short.toml", "--run", "one").code == 0
    path = place / "runs" / "one" / "switches" / "001" / "certificate.json"
    record = json.loads(path.read_text())
    record["bytes"]["moved"] += 4
    path.write_text(json.dumps(record))
    said = dynatrain("check", "one", cwd=place)
    assert said.code == 3
    assert "coverage says" in said.out
    path.unlink()
    said = dynatrain("check", "one", cwd=place)
    assert said.code == 3
    assert "never came to its end" in said.out


def test_under_json_a_run_ends_with_one_object_and_shows_progress_elsewhere(place):
    said = train(place, "short.toml", "--json")
    assert said.code == 0
    assert said.record["exit"] == 0
    assert said.record["steps"] == 20
    assert said.record["first_loss"] > said.record["last_loss"]
    assert "step 20/20" in said.err


def test_a_terminal_gets_a_bar(place):
    master, slave = os.openpty()
    command = [sys.executable, MAIN, "cli_toy:train", "train", "short.toml"]
    with subprocess.Popen(command, cwd=place, env=environment() | {"TERM": "xterm"}, stdout=slave, stderr=slave) as run:
        os.close(slave)
        shown = b""
        try:
            while block := os.read(master, 65536):
                shown += block
        except OSError:
            pass  # the terminal's other end is closed
    os.close(master)
    assert run.returncode == 0
    text = shown.decode()
    assert "\x1b[" in text
    assert "━" in text
    assert "switch 1: dp2 -> tp2 committed" in text


def test_a_failing_rank_ends_the_run_with_code_3_and_the_reason(place):
    said = train(place, "short.toml", "--run", "bad", entry="broken")
    assert said.code == 3
    assert "RuntimeError: planted" in said.out
    assert "dynatrain logs bad" in said.out
    assert "RuntimeError: planted" in dynatrain("logs", "bad", "--rank", "0", cwd=place).out


def test_a_running_run_can_be_asked_switched_and_stopped(place):
    with training(place) as process:
        assert "running (process" in dynatrain("status", "long", cwd=place).out
        refused = train(place, "short.toml", "--run", "long")
        assert refused.code == 2
        dry = dynatrain("switch", "long", "fsdp2", "--dry-run", "--json", cwd=place)
        assert dry.code == 0
        assert dry.record["from"] == "tp2"
        assert dry.record["bytes"]["moved"] > 0
        same = dynatrain("switch", "long", "tp2", cwd=place)
        assert (same.code, same.out) == (0, "unchanged: it is in that layout\n")
        done = dynatrain("switch", "long", "fsdp2", "--json", cwd=place)
        assert done.code == 0
        assert done.record["outcome"] == "done"
        assert done.record["certificate"]["cause"] == {"verb": "switch", "by": "cli", "request_id": done.record["id"]}
        assert done.record["certificate"]["plan_hash"] == dry.record["plan_hash"]
        assert dynatrain("switch", "long", "fsdp3", cwd=place).code == 2
        assert dynatrain("stop", "long", cwd=place).code == 0
        assert process.wait(20) == 0
    assert dynatrain("check", "long", cwd=place).code == 0


def test_an_aborted_switch_says_why_and_ends_with_code_3(place):
    with training(place, seed=13):
        said = dynatrain("switch", "long", "fsdp2", cwd=place)
        assert said.code == 3
        assert said.out.startswith("aborted: planted\nswitch 2: tp2 -> fsdp2 aborted")


@pytest.mark.sweep
def test_two_agents_under_torchrun_share_a_run_and_the_first_speaks_of_it(place):
    port = _free_port()
    agents = []
    for node in (1, 0):
        launch = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
        command = [str(Path(sys.executable).parent / "torchrun"), *launch, f"--master-port={port}", "--"]
        command += [MAIN, "cli_toy:train", "train", "short.toml", "--run", "two"]
        agents.append(
            subprocess.Popen(
                command, cwd=place, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    (other, _), (first, _) = (agent.communicate(timeout=90) for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0]
    assert "check it:  dynatrain check two" in first
    assert "check it" not in other
    assert dynatrain("check", "two", cwd=place).code == 0


def test_several_agents_need_a_name_for_their_run(place, monkeypatch):
    launched = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (launched | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    said = train(place, "short.toml")
    assert said.code == 2
    assert "--run NAME" in said.err


def _free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_ctrl_c_ends_a_run_with_130(place):
    with training(place) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(6) == 130
    assert "ended with code 130" in dynatrain("status", "long", cwd=place).out
