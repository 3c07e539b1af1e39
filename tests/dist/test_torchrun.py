"""The same run under torchrun: two agents on one machine, over the loopback."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from tests.dist.agents import RunningAgent, agent, environment, gone, until

from dynatrain.observe.log import Tail


def two_agents(stack: ExitStack, folder: Path, entry: str, ranks: int, **env: str) -> list[RunningAgent]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    before = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    address = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return [
        stack.enter_context(agent(folder, entry, ranks, 20.0, *before, *address, f"--node-rank={node}", **env))
        for node in range(2)
    ]


def _until_training(run: RunningAgent) -> dict[int, int]:
    """Process numbers of all ranks, once each has begun to train."""
    started = until(lambda: len(found := run.events("ranks_started")) == 2 and found, 60)
    pids = {rank: pid for event in started for rank, pid in zip(event["ranks"], event["pids"], strict=True)}
    until(lambda: all(psutil.Process(pid).num_threads() > 3 for pid in pids.values()))
    return pids


@pytest.mark.sweep
def test_a_rank_lost_on_one_node_ends_the_agents_of_both_with_the_cause(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second = two_agents(stack, tmp_path / "run", "train", 4)
        pids = _until_training(first)
        assert sorted(event["ranks"] for event in first.events("ranks_started")) == [[0, 1], [2, 3]]
        below = first.below() + second.below()
        os.kill(pids[2], signal.SIGKILL)
        assert 0 not in (first.end()[0], second.end()[0])
        assert [event["exit"] for event in first.events("agent_ended")] == [3, 3]
        reasons = [event["reason"] for event in first.events("run_failed")]
        assert any(f"rank 2 (process {pids[2]}) was killed by SIGKILL" in reason for reason in reasons)
        assert gone(below)


CONFIG = """
layout = "fsdp2"
steps = 12
device = "cpu"
[model]
config = "tiny"
[data]
paths = ["text"]
tokenizer = "bytes"
sequence = 32
validation = 0.0
[batch]
global_sequences = 2
micro_sequences = 1
[[switch]]
step = 6
layout = "dp2"
"""


def test_a_real_run_over_two_nodes_has_the_losses_of_one_on_one_node(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("\n".join(f"{i} and {i} make {2 * i}" for i in range(2000)))
    (tmp_path / "run.toml").write_text(CONFIG)
    words = ["-m", "dynatrain", "train", "run.toml", "--run"]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = ["--master-addr=127.0.0.1", f"--master-port={probe.getsockname()[1]}"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *address]
    commands = [[*launch, f"--node-rank={node}", *words[:1], "--", *words[1:], "two"] for node in range(2)]
    commands.append([sys.executable, *words, "one"])
    settings = {
        "cwd": tmp_path,
        "env": environment(),
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    running = [subprocess.Popen(command, **settings) for command in commands]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], said
    one, two = (Tail(tmp_path / "runs" / name / "metrics.jsonl").new() for name in ("one", "two"))
    assert [line["step"] for line in two] == list(range(12))
    assert [line["layout"] for line in two] == ["fsdp2"] * 6 + ["dp2"] * 6
    assert [line["loss"] for line in two] == [line["loss"] for line in one]


@pytest.mark.sweep
def test_sigterm_on_one_node_stops_both_where_ranks_hand_nothing_over(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        first, second = two_agents(stack, tmp_path / "run", "train", 4)
        _until_training(first)
        below = first.below() + second.below()
        second.send(signal.SIGTERM)
        for run in (first, second):
            run.end()
        assert [event["exit"] for event in first.events("agent_ended")] == [143, 143]
        assert len({first.run.log(rank).read_text() for rank in range(4)}) == 1
        assert gone(below)


@pytest.mark.sweep
def test_a_run_over_two_nodes_ends_well(tmp_path: Path) -> None:
    with ExitStack() as stack:
        runs = two_agents(stack, tmp_path / "run", "short", 4)
        assert [run.end(60)[0] for run in runs] == [0, 0]
