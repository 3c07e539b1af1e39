"""The fork server refuses to fork from a process with threads: a child could inherit a lock that is held."""

import os
import subprocess
import sys

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
