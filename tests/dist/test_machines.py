"""Two machines that are network namespaces with names of their own: what listens where, and who can come from there."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from tests.cli import dynatrain, environment
from tests.dist.paced import PACE
from tests.dist.test_crossing_runs import CONFIG, MAIN, steps_of, until
from tests.pace import allowed

from dynatrain.observe.address import Address
from dynatrain.observe.log import Tail
from dynatrain.observe.requests import Request, submit
from dynatrain.observe.run import RunFolder

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(300)]
ADDRESS = {"a": "10.77.0.1", "b": "10.77.0.2"}


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def machines():
    """``(words before a command, for machine a and for machine b)``; their interfaces are ``eth-a`` and ``eth-b``."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    names = {one: f"dynatrain-{one}-{os.getpid()}" for one in ADDRESS}
    with ExitStack() as stack:
        for name in names.values():
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
            stack.callback(ip, "netns", "del", name)
        ip("link", "add", "eth-a", "netns", names["a"], "type", "veth", "peer", "name", "eth-b", "netns", names["b"])
        for one, name in names.items():
            ip("-n", name, "addr", "add", f"{ADDRESS[one]}/24", "dev", f"eth-{one}")
            for link in (f"eth-{one}", "lo"):
                ip("-n", name, "link", "set", link, "up")
        inside = '{} "$@"'.format  # its own name, then the command
        yield [
            ["ip", "netns", "exec", names[one], "unshare", "--uts", "sh", "-c", inside(f"hostname m{one}; exec"), "-"]
            for one in ADDRESS
        ]


def trained(stack, place, machines):
    """A run on machine a that b has joined with a rank."""
    (place / "text").mkdir()
    for name in "ab":
        words = (f"{name}{number * number} to be or not to be, " for number in range(900))
        (place / "text" / f"{name}.txt").write_text("".join(words))
    (place / "run.toml").write_text(CONFIG.replace("fsdp2", "dp1") + "[save]\nevery = 5\n")
    env = environment() | {PACE: "0.1"}
    del env["GLOO_SOCKET_IFNAME"]
    about = {"cwd": place, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = ["train", "run.toml", "--run", "one", "--world.interface", "eth-a"]
    run = RunFolder(place / "runs" / "one")
    first = stack.enter_context(subprocess.Popen([*machines[0], sys.executable, MAIN, "paced:main", *words], **about))
    stack.callback(first.kill)
    until(lambda: run.exists and len(steps_of(run)) > 3, first)
    join = [sys.executable, "-m", "dynatrain", "join", "one", "--ranks", "1", "--interface", "eth-b"]
    second = stack.enter_context(subprocess.Popen([*machines[1], *join], **about))
    stack.callback(second.kill)
    until(lambda: steps_of(run)[-1]["layout"] == "fsdp2", first)
    last = steps_of(run)[-1]["step"]
    until(lambda: steps_of(run)[-1]["step"] > last + 7, first)
    return first, second, run


def cut(machines):
    """Nothing passes between the machines any more."""
    subprocess.run([*machines[0], "ip", "link", "set", "eth-a", "down"], check=True)


def of(run, kind):
    return [event for event in Tail(run.events).new() if event["kind"] == kind]


def test_a_machine_that_goes_without_a_word_is_missed_by_its_silence_and_the_one_that_joined_leads(tmp_path, machines):
    with ExitStack() as stack:
        first, second, run = trained(stack, tmp_path, machines)
        cut(machines)
        first.kill()  # so nobody hears of it
        began = time.time()
        line = until(lambda: [line for line in steps_of(run) if line["attempt"]], second)[0]
        sys.stdout.write(f"{line['time'] - began:.2f} s from the loss of the machine to the end of the next step\n")
        assert line["time"] - began < 2 * allowed(10.0)
        (taken,) = of(run, "succession")
        assert (taken["hosts"], taken["layout"]) == (["mb"], "dp1")
        assert "does not answer" in of(run, "lead_lost")[0]["reason"]
        assert (Address.read(run.path).host, run.agent().host) == ("10.77.0.2", "mb")
        submit(run.requests, Request(id="stop", verb="stop"))
        assert second.wait(60) == 75


def test_a_machine_that_is_cut_off_from_a_lead_that_lives_ends_and_takes_nothing(tmp_path, machines):
    with ExitStack() as stack:
        first, second, run = trained(stack, tmp_path, machines)
        mark = run.agent()
        cut(machines)
        said = second.communicate(timeout=60)[0]
        assert (second.returncode, "the agent that leads lives, and this host is cut off" in said) == (3, True), said
        assert run.agent() == mark
        assert first.poll() is None
        assert not of(run, "succession")


def test_an_agent_of_another_machine_joins_over_the_named_interface_and_is_drained_by_name(tmp_path, machines):
    (tmp_path / "text").mkdir()
    for name in "ab":
        words = (f"{name}{number * number} to be or not to be, " for number in range(900))
        (tmp_path / "text" / f"{name}.txt").write_text("".join(words))
    (tmp_path / "run.toml").write_text(CONFIG.replace("fsdp2", "dp1"))
    env = environment() | {PACE: "0.1"}
    del env["GLOO_SOCKET_IFNAME"]  # the run's own setting is to be enough
    about = {"cwd": tmp_path, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-m", "dynatrain"]
    on_a, on_b = machines
    run = RunFolder(tmp_path / "runs" / "one")
    with ExitStack() as stack:
        train = [
            *on_a,
            sys.executable,
            MAIN,
            "paced:main",
            "train",
            "run.toml",
            "--run",
            "one",
            "--world.interface",
            "eth-a",
        ]
        first = stack.enter_context(subprocess.Popen(train, **about))
        stack.callback(first.kill)
        until(lambda: run.exists and len(steps_of(run)) > 3, first)
        port = Address.read(run.path).port
        sockets = subprocess.check_output([*on_a, "cat", "/proc/net/tcp", "/proc/net/tcp6"], text=True)
        listeners = [line.split()[1] for line in sockets.splitlines() if " 0A " in line]
        assert listeners  # the store and the ranks, on the interface alone: 10.77.0.1, as the kernel writes it
        assert {address.rpartition(":")[0] for address in listeners} == {"01004D0A"}
        assert any(int(address.rpartition(":")[2], 16) == port for address in listeners)

        join = [*on_b, *command, "join", "one", "--ranks", "1", "--interface", "eth-b"]
        second = stack.enter_context(subprocess.Popen(join, **about))
        stack.callback(second.kill)
        until(lambda: steps_of(run)[-1]["layout"] == "fsdp2", first)
        assert "node 1, mb: rank 1" in dynatrain("status", "one", cwd=tmp_path).out
        drained = dynatrain("drain", "one", "--host", "mb", before=(*command[1:],), cwd=tmp_path)
        assert (drained.code, "gone: nodes [1]" in drained.out) == (0, True), drained
        assert second.wait(30) == 0
        last = steps_of(run)[-1]["step"]
        until(lambda: steps_of(run)[-1]["step"] > last + 5, first)
        agent = next(event["pid"] for event in Tail(run.events).new() if event["kind"] == "agent_started")
        os.kill(agent, signal.SIGTERM)
        assert first.wait(60) == 75
