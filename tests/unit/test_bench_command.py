"""``dynatrain bench`` where the bench itself fails."""

import signal

from dynatrain.app.commands import bench as bench_command
from dynatrain.train import bench


def test_a_bench_that_fails_says_why_and_is_no_bug_of_ours(monkeypatch, capsys):
    def fails(*_, **__):
        raise bench.BenchError("fsdp4 -> pp4, restart: new rank 1: OSError: [Errno 28] no space left")

    monkeypatch.setattr(bench, "run_bench", fails)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the command's own, of SIGTERM
    assert bench_command.run(["switch", "--model", "tiny"]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "fsdp4 -> pp4, restart: new rank 1: OSError: [Errno 28] no space left\n"
