"""An agent that another program holds: it ends with its holder, whatever becomes of that; and as a Ray actor."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tests.cli import environment
from tests.dist.test_crossing_runs import place, steps_of

import dynatrain
from dynatrain.app.mistake import MistakeError
from dynatrain.observe.asked import NotDoneError
from dynatrain.observe.run import RunFolder

assert place  # a fixture

pytestmark = pytest.mark.timeout(200)

HOLDER = """
import sys, time, dynatrain
agent = dynatrain.RunAgent("run.toml", run=sys.argv[1], settings=["--world.max=4"])
print(agent.start(), flush=True)
time.sleep(600)
"""


def until(look, seconds=60):
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def below(pid):
    """A process and all that it has brought about."""
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def gone(processes, seconds=30):
    _, left = psutil.wait_procs(processes, timeout=seconds)
    return not left


@pytest.mark.sweep
def test_a_holder_that_is_killed_takes_its_run_with_it_saved(place):
    run = RunFolder(place / "runs" / "held")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.path)], cwd=place, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        pid = int(holder.stdout.readline())
        until(lambda: len(steps_of(run)) > 3)
        everything = below(pid)
        assert len(everything) > 3
        holder.send_signal(signal.SIGKILL)
        assert gone(everything)
        assert run.agent().exit == 75
        assert list(run.checkpoints.iterdir())
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.sweep
def test_an_agent_that_cannot_start_says_why_and_one_is_started_once(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    wrong = dynatrain.RunAgent("run.toml", run=place / "runs" / "wrong", settings=["--layout=fdsp2"])
    with pytest.raises(MistakeError, match=r"(?s)ended with code 2: .*fsdp2"):
        wrong.start()
    agent = dynatrain.RunAgent("run.toml", run=place / "runs" / "one")
    assert agent.poll() is None
    with pytest.raises(ValueError, match="No run"):
        agent.park()
    pid = agent.start()
    with pytest.raises(MistakeError, match=f"was started already, as process {pid}"):
        agent.start()
    everything = below(pid)
    until(lambda: len(steps_of(RunFolder(place / "runs" / "one"))) > 2)
    assert agent.park().outcome == "done"
    assert agent.end() == 75
    assert gone(everything)


@pytest.mark.ray
def test_a_ray_actor_holds_an_agent_and_takes_it_along_when_it_is_killed(place, monkeypatch):
    ray = pytest.importorskip("ray", reason="the extra is not installed: pip install dynatrain[ray]")
    monkeypatch.chdir(place)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # it would leave a token in the home folder
    run = RunFolder(place / "runs" / "acted")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        actor = ray.remote(dynatrain.RunAgent).remote(str(place / "run.toml"), run=str(run.path))
        everything = below(ray.get(actor.start.remote()))
        until(lambda: len(steps_of(run)) > 3)
        lent = ray.get(actor.lend.remote(ranks=[1]))
        assert (lent.outcome, lent.message.endswith("node 0 slot 1")) == ("done", True)
        assert ray.get(actor.reclaim.remote()).outcome == "done"
        assert ray.get(actor.park.remote()).outcome == "done"
        with pytest.raises(NotDoneError, match="the run is parked"):
            ray.get(actor.switch.remote("dp2"))
        assert ray.get(actor.unpark.remote()).outcome == "done"
        everything += [process for process in below(everything[0].pid) if process not in everything]
        assert ray.get(actor.save.remote()).outcome == "done"
        ray.kill(actor)  # Ray kills an actor's children, too: the agent is not asked, and nothing of it is left
        assert gone(everything)
        assert run.liveness() == "gone"
        again = ray.remote(dynatrain.RunAgent).remote(str(place / "run.toml"), run=str(run.path))
        everything = below(ray.get(again.start.remote()))
        assert ray.get(again.end.remote()) == 75  # it goes on from what was saved, and ends saved
        assert gone(everything)
    finally:
        ray.shutdown()
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.agent().pid, signal.SIGKILL) if run.agent().exit is None else None
