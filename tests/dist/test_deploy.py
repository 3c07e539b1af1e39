"""Signals as schedulers send them: ``deploy/slurm.sh`` with stand-ins for Slurm's commands, and a pod's agent."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import psutil
import pytest
from tests.dist.agents import JOIN, MAIN, ROOT, agent, environment, gone, until
from tests.dist.test_members import CROSS, ask, crossings, living, stop

from dynatrain.observe.log import Tail
from dynatrain.observe.run import RunFolder

pytestmark = pytest.mark.sweep

SRUN = """#!/usr/bin/env bash
# Starts two tasks, as srun does; its code is the highest of theirs.
[[ $1 == --kill-on-bad-exit=0 ]] || exit 9
shift
for task in 0 1; do SLURM_PROCID=$task SLURM_NTASKS=2 "$@" & pids+=($!); done
code=0
for pid in "${pids[@]}"; do wait "$pid"; one=$?; ((one > code)) && code=$one; done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in show) echo 127.0.0.1 ;; requeue) echo "$2" >> requeued ;; esac
"""
DYNATRAIN = f"""#!/usr/bin/env bash
[[ $1 == train && $3 == --run ]] || exit 9
exec {sys.executable} {MAIN} "$4" {CROSS} 2 20
"""


def test_slurm_drains_a_preempted_node_and_queues_again_what_stopped_saved(tmp_path):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("dynatrain", DYNATRAIN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "CONFIG": "c",
        "RUN": str(tmp_path / "run"),
    }
    env = environment(**slurm, GRACE="20", PATH=f"{tmp_path}:{os.environ['PATH']}")
    script = subprocess.Popen([str(ROOT / "deploy" / "slurm.sh")], cwd=tmp_path, env=env)
    try:
        run = RunFolder(tmp_path / "run")
        seen = lambda kind: [event for event in Tail(run.events).new() if event["kind"] == kind]  # noqa: E731
        until(lambda: len(seen("ranks_started")) == 2, 60)
        agents = {event["node"]: psutil.Process(event["pid"]) for event in seen("agent_started")}
        for process in (agents[1], *agents[1].children(recursive=True)):  # as Slurm signals all processes of a task
            process.send_signal(signal.SIGTERM)
        until(lambda: seen("host_left"))
        agents[1].wait(10)
        assert [event["exit"] for event in seen("agent_ended")] == [0]
        assert script.poll() is None
        for process in psutil.Process(script.pid).children(recursive=True):
            if process.name() not in {"srun", "bash"}:
                process.send_signal(signal.SIGTERM)
        assert script.wait(40) == 75
        assert (tmp_path / "requeued").read_text().split() == [slurm["SLURM_JOB_ID"]]
    finally:
        left = psutil.Process(script.pid).children(recursive=True) if script.poll() is None else []
        for process in left:
            process.kill()
        script.kill()


@pytest.mark.parametrize("before_stop", [True, False])
def test_a_pods_agent_is_process_1_drains_before_it_is_stopped_and_ends_with_0(tmp_path, before_stop):
    folder = tmp_path / "run"
    with ExitStack() as stack:
        first = stack.enter_context(agent(folder, CROSS, 1))
        first.pids()
        pod = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable)
        joined = stack.enter_context(agent(folder, CROSS, 1, 20.0, *pod, main=JOIN, PLACE="pod-7"))
        until(lambda: ("done", [0, 1]) in crossings(first))
        (one,) = psutil.Process(joined.process.pid).children()
        below = joined.below()
        if before_stop:  # preStop: the drain is answered when the host has left; SIGTERM finds nobody any more
            assert ask(first, nodes=[1]).outcome == "done"
        else:
            one.send_signal(signal.SIGTERM)
        code, said, _ = joined.end()
        assert (code, gone(below)) == (0, True), said
        assert living(first) == [0]
        stop(first)
