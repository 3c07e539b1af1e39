"""The fork server refuses to fork from a process with threads: a child could inherit a lock that is held.

And its channel, and the last words of what it forks, without any rank.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from dynatrain.cluster.context import Report
from dynatrain.cluster.spawner import Spawner

pytestmark = pytest.mark.clock

MODULE = """
import threading, time
def train(context): pass
if {threads}:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""
LOAD = (
    "from dynatrain.cluster.forkserver import load; import torch; load('entry:train'); print(torch.get_num_threads())"
)


def load(folder, *, threads):
    (folder / "entry.py").write_text(MODULE.format(threads=threads), encoding="utf-8")
    paths = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-c", LOAD]
    # Torch would take four; numpy's threads, which start with its import, are the spawner's affair.
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_a_process_with_threads_is_not_forked(tmp_path):
    refused = load(tmp_path, threads=True)
    assert refused.returncode != 0
    assert "NotForkableError: Importing entry starts 1 thread(s)" in refused.stderr
    assert "Start threads inside the entry function" in refused.stderr


def test_a_process_with_one_thread_is_forked_and_keeps_torch_to_it(tmp_path):
    loaded = load(tmp_path, threads=False)
    assert (loaded.returncode, loaded.stdout.strip()) == (0, "1"), loaded.stderr


MANY = 400
"""More orders, and reports, than the channel takes when nobody reads."""


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A spawner and the other end of its channel, with nobody there who reads."""
    ends = []

    def start(_command, *, pass_fds, **_):
        ends.append(socket.socket(fileno=os.dup(pass_fds[0])))
        return SimpleNamespace(wait=lambda _: 0)

    monkeypatch.setattr(subprocess, "Popen", start)
    with Spawner("entry:train", tmp_path / "log") as spawner, ends[0] as theirs:
        yield spawner, theirs


def test_orders_wait_for_a_server_that_waits_for_its_reports_to_be_read(server):
    spawner, theirs = server
    orders = []

    def serve():
        for number in range(MANY):
            theirs.send(Report(kind="forked", member=number, pid=1).to_json().encode())
        orders.extend(json.loads(theirs.recv(1 << 16))["member"] for _ in range(MANY))

    thread = threading.Thread(target=serve)
    thread.start()
    for number in range(MANY):
        spawner.signal(number, 9)
    thread.join(10)
    assert orders == list(range(MANY))
    assert [report.member for report in spawner.receive()] == list(range(MANY))
    assert spawner.receive() == []
    theirs.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionError, match="has ended"):
        spawner.receive()


def test_a_halted_server_is_waited_for_once(server, monkeypatch):
    monkeypatch.setattr("dynatrain.cluster.spawner.ROOM_SECONDS", 0.2)
    spawner, _ = server
    began = time.monotonic()
    for number in range(MANY):
        spawner.signal(number, 9)
    assert 0.2 < time.monotonic() - began < 5


LIVE = """
import os, sys
from dynatrain.cluster.context import RankContext
from dynatrain.cluster.rank import live
def entry(context): {entry}
read, words = os.pipe()
parent = os.getpid()
if not os.fork():
    live(entry, RankContext(member=0, rank=0, node=0, local_rank=0, world_size=1, ranks_per_node=None, store_host="",
         store_port=0, store_prefix="", run=sys.argv[1], device="cpu", backend="gloo", generation=0, attempt=0,
         realtime=False), parent=parent, words=words)
code = os.waitstatus_to_exitcode(os.wait()[1])
os.close(words)
print(code, os.read(read, 1 << 16).decode())
"""


@pytest.mark.parametrize(
    ("entry", "code", "said"),
    [
        ("sys.exit('the dataset is gone')", 1, "the dataset is gone"),
        ("sys.exit(('no', 'data'))", 1, "('no', 'data')"),
        ("raise OSError('no data')", 1, "OSError: no data"),
        ("sys.exit(75)", 75, ""),
        ("sys.exit()", 0, ""),
        ("return 3", 3, ""),
    ],
)
def test_the_last_words_of_a_rank_reach_the_agent_and_its_log(tmp_path, entry, code, said):
    (tmp_path / "logs").mkdir()
    command = [sys.executable, "-c", LIVE.format(entry=entry), str(tmp_path)]
    ended, _, told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition(" ")
    assert int(ended) == code
    assert (json.loads(told)["words"] if told.strip() else "") == said
    assert said in (tmp_path / "logs" / "rank_0.log").read_text()
