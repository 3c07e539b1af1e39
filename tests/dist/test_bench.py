"""The bench in small: every method runs, is checked, and is told in the words of the design."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from tests.cli import dynatrain, environment
from tests.dist.agents import gone, until
from tests.dist.foreign import everywhere

from dynatrain.space.presets import resolve_model
from dynatrain.train import baselines, hand_written, probe, restart
from dynatrain.train import bench as measured
from dynatrain.train.bench import METHODS, TMPFS, BenchError, run_bench

TINY = resolve_model("tiny")
FIELDS = {"case", "method", "seconds", "stall_seconds", "lost_seconds", "bytes", "floor_seconds", "ratio", "peak_bytes"}
FIELDS |= {"link_gb_s"}


def bench(cases, **more):
    return run_bench(TINY, cases, ranks=2, repeats=1, slow_repeats=1, tell=lambda _line: None, **more)


def left(process):
    """What a bench has in memory; other benches may run on this machine."""
    return list(TMPFS.glob(f"dynatrain-bench-{process}-*"))


def below(folder):
    """The processes that were told of a folder: a bench by these tests, torchrun and new ranks by the bench."""
    told = ((process, process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [process for process, words in told if any(word.startswith(str(folder)) for word in words)]


def test_every_method_is_measured_and_checked_and_what_it_cannot_do_is_said(tmp_path):
    words = ["switch", "--model=tiny", "--ranks=2", "--from=fsdp2", "--to=pp2", "--repeats=2", "--json"]
    ran = dynatrain("bench", *words, cwd=tmp_path, timeout=120)
    assert ran.code == 0, ran.err
    rows = ran.record["rows"]
    assert len(rows) == len(METHODS)
    for row in rows:
        assert row.keys() >= FIELDS
        possible = row["method"] != "redistribute"
        assert (row["seconds"] is not None) == possible == (not row["note"])
        assert row["probed"].keys() == {"link", "wire", "copy", "group_link", "group_wire", "digest"}
        assert 0 < row["probed"]["group_link"] <= row["probed"]["link"]
        assert row["runs"] == (2 if row["method"] == "dynatrain" else possible)
        if not possible:
            continue
        assert row["stall_seconds"] >= row["seconds"] > 0
        assert row["ratio"] > 0
        assert row["digest_floor_seconds"] > 0
        if row["method"] == "restart":
            assert row["seconds"] == row["stall_seconds"] > row["phases"]["start"] > 0
        if row["method"] == "dynatrain":
            assert 0 < row["digest_seconds"] < row["seconds"]
        else:
            assert row["digest_seconds"] is None
        assert row["bytes"] > 0
        if row["mode"] == "tight":
            assert 0 < row["counted_bytes"] <= row["allowed_bytes"]


@pytest.mark.sweep
def test_a_bench_that_is_ended_leaves_nothing_in_memory(tmp_path):
    command = [sys.executable, "-m", "dynatrain", "bench", "switch", "--model=tiny", "--repeats=50"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert "dynatrain keep" in process.stderr.readline()
    assert left(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143, process.stderr.read()
    assert not left(process.pid)


def first_part(inner, _outer):
    """Slices of the right size, in the wrong place wherever a box does not begin where its rank's does."""
    return tuple(slice(0, stop - start) for start, stop in inner)


def test_methods_that_leave_other_state_are_no_measurement(monkeypatch):
    monkeypatch.setattr(measured, "METHODS", (*measured.OURS[:1], "hand_written", "dcp"))
    monkeypatch.setattr(hand_written, "within", first_part)
    monkeypatch.setattr(baselines, "through_files", lambda *_: None)
    with pytest.raises(BenchError) as told:
        bench([("fsdp2", "tp2")])
    assert str(told.value).splitlines() == [
        f"fsdp2 -> tp2, {method}: the state that arrived is another" for method in ("hand_written", "dcp")
    ]
    assert not left(os.getpid())


def test_a_rank_that_fails_ends_the_bench_with_its_words(monkeypatch, tmp_path):
    def fail(_source, _target, folder):
        if dist.get_rank() == 1:
            raise OSError(f"no space left in {folder.parent.parent}")
        time.sleep(60)

    monkeypatch.setattr(measured, "METHODS", (*measured.OURS[:1], "dcp"))
    monkeypatch.setattr(baselines, "through_files", fail)
    began = time.monotonic()
    with pytest.raises(BenchError, match=f"rank 1: OSError: no space left in {re.escape(str(tmp_path))}$"):
        bench([("fsdp2", "tp2")], checkpoints=tmp_path)
    assert not list(tmp_path.iterdir())
    assert time.monotonic() - began < 30


def test_a_new_rank_that_fails_ends_the_bench_with_its_words_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(measured, "_everywhere", lambda *_: [[]])  # no old rank leaves an order
    with pytest.raises(BenchError, match=r"^fsdp2 -> dp1, restart: new rank 0: FileNotFoundError: .*/order"):
        measured._restarted(TINY, ("fsdp2", "dp1"), 1, tmp_path / "restart")
    assert not below(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.sweep
def test_a_restart_that_brings_other_state_is_no_measurement(monkeypatch, tmp_path):
    save = baselines.dcp_save

    def other(held, folder):
        next(iter(held.values())).add_(1.0)
        save(held, folder)

    monkeypatch.setattr(baselines, "dcp_save", other)
    samples = measured._restarted(TINY, ("fsdp2", "tp2"), 2, tmp_path / "restart")
    assert [sample.problem for sample in samples] == ["the state that arrived is another"] * 2


@pytest.mark.sweep
def test_new_ranks_that_do_not_come_in_time_and_those_of_a_killed_bench_are_ended(tmp_path):
    code = "import pathlib, sys; from dynatrain.train import restart; "
    code += "restart.begin_anew(pathlib.Path(sys.argv[1]), 1, timeout=60)"
    late, killed = tmp_path / "late", tmp_path / "killed"
    for folder in (late, killed):
        folder.mkdir()
        os.mkfifo(folder / "order")  # which nobody writes: the new rank waits for ever
    process = subprocess.Popen([sys.executable, "-c", code, str(killed)], env=environment())
    with pytest.raises(restart.RestartError, match="the new ranks were not ready within 1 s"):
        restart.begin_anew(late, 1, timeout=1.0)
    assert not below(late)
    processes = until(lambda: len(found := below(killed)) == 3 and found)
    process.kill()
    process.wait()
    assert gone(processes, 20)


def test_the_last_rank_decides_what_the_probe_finds():
    def work(world):
        copy = probe._copy

        def slow(source, target):
            copy(source, target)
            time.sleep(0.1 * world.rank)

        probe._copy = slow
        return probe.probe(dist.group.WORLD, torch.device("cpu"), nbytes=1 << 20, repeats=2)

    rates = everywhere(2, work)
    assert rates[0] == rates[1]
    assert rates[0].copy_bytes_per_second < 2 * (1 << 20) / 0.1
    assert rates[0].link_bytes_per_second > 1e6
    assert rates[0].wire_bytes_per_second > 1e6
