"""Faults of every kind, one after the other: nothing hangs, and the run is the one that nobody has struck, bit by bit.

``make soak`` takes SOAK_FAULTS of them (224: every cell twice). What was taken stands in SOAK_LEDGER, so that a soak
that was broken off goes on where it was; SOAK_SECONDS is how long one run is struck before its numbers are looked at,
and SOAK_RUNS how many are struck side by side: mostly they wait.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests import jobs, ranks
from tests.cli import dynatrain, environment
from tests.dist.trained import sit_down
from tests.soak.soak import AGENT, BATCH, CELLS, KINDS, LIMIT, PATIENCE, PHASES, SEED, SEQUENCE, VICTIMS, Fault, Soak
from tests.soak.soak import faults as all_faults
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dynatrain.config.own import load_own
from dynatrain.data.order import batch_ids
from dynatrain.data.prepare import open_samples
from dynatrain.observe.checkpoints import checkpoint_name
from dynatrain.observe.log import Tail
from dynatrain.observe.run import RunFolder
from dynatrain.space.run_check import check_run
from dynatrain.train.rank import job_of, samples_of
from dynatrain.train.trainer import Trainer

SHORT = (("train", "agent", "delay"), ("warm", "new", "kill"), ("move", "old", "kill"))
"""What ``make test`` has the time for."""
EXPECTED = {
    ("old", "kill"): {"mended"},
    ("old", "stop"): {"mended"},
    ("old", "cut"): {"mended"},
    ("new", "kill"): {"aborted", "mended"},
    ("new", "stop"): {"aborted", "mended"},
    ("new", "cut"): {"aborted", "mended"},
    ("agent", "kill"): {"mended"},
    ("agent", "stop"): {"mended"},
    ("agent", "cut"): {"mended"},
    ("lead", "kill"): {"succeeded"},
    ("lead", "stop"): {"succeeded"},
    ("lead", "cut"): {"mended"},
}
"""What follows. Whoever is late for a moment has harmed nobody: that is looked at apart."""


@contextmanager
def alone(place, steps):
    """The same run, on one rank and left alone; saved at its end."""
    words = ("--layout=dp1", "--save.every=0", f"--steps={steps}")
    command = [sys.executable, AGENT, "train", "run.toml", "--run", "alone", *words]
    env = environment() | {"SOAK_PATIENCE": "60"}
    process = subprocess.Popen(command, cwd=place, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process, RunFolder(place / "runs" / "alone")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def undisturbed(run, until):
    """The same, in a process that has no agent."""
    checked = check_run(load_own(run.path).config)

    def work(world):
        found = []
        sit_down(world)
        sw = jobs.switcher(job_of(checked), world, "dp1")
        told = lambda done: found.append({"step": done.step, "loss": done.loss, "grad_norm": done.grad_norm})  # noqa: E731
        Trainer(job_of(checked), samples_of(checked, run.path), sw, told).run(until)
        return found

    (found,) = ranks.run(1, work)
    return found


def lines_of(run):
    return [line for line in Tail(run.metrics).new() if line["kind"] == "step"]


def stop(soak):
    """End the struck run, saved; all its agents say so."""
    soak.base()
    soak.ask("stop")
    soak.until(lambda: all(agent.poll() is not None for agent in soak.agents))
    assert [agent.returncode for agent in soak.agents] == [75, 75], soak.last_words()
    soak.look()


def check_order(soak):
    """No step is missing, and one comes again only where that was said: after a loss, or from a checkpoint."""
    said = {event["step"] for event in soak.events if event["kind"] in {"loss", "load"}} | {0}
    again = 0
    for one, other in pairwise(soak.steps):
        if other["step"] == one["step"] + 1:
            continue
        assert other["step"] in said, (one, other)
        assert (other["attempt"], other["generation"]) > (one["attempt"], one["generation"]), (one, other)
        assert other["step"] <= one["step"], (one, other)
        again += one["step"] + 1 - other["step"]
    return again


def check_numbers(soak, undisturbed):
    """Every line is that of the run which nobody has struck, also of steps that were made again: all digits."""
    expected = {line["step"]: (line["loss"], line["grad_norm"]) for line in undisturbed}
    samples = open_samples(soak.run.path, SEQUENCE)
    for line in soak.steps:
        assert (line["loss"], line["grad_norm"]) == expected[line["step"]], (line, expected[line["step"]])
        assert line["samples"] == batch_ids(SEED, line["step"], BATCH, len(samples)).tolist()


def check_state(soak, other, step):
    """The parameters and moments that were saved at the end are those of the other run.

    Streams of ranks are not: those of a newcomer are its own, and nothing in this run draws from them.
    """
    one, two = (tensors_of(run.checkpoints / checkpoint_name(step)) for run in (soak.run, other))
    assert one.keys() == two.keys()
    assert {key.partition(".")[0] for key in one} == {"model", "optim"}
    assert [key for key in one if not torch.equal(one[key], two[key])] == []


def tensors_of(path):
    """Every tensor of a checkpoint, by its path in the nested state; torch's own reader."""
    whole = path.with_suffix(".pt")
    dcp_to_torch_save(path, whole)
    found = {}

    def walk(value, at):
        if isinstance(value, torch.Tensor):
            found[at] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{at}.{key}" if at else str(key))

    walk(torch.load(whole, weights_only=False), "")
    whole.unlink()
    return {key: value for key, value in found.items() if not key.startswith("streams.")}


def check_hits(hits):
    """What has become of each fault is what is promised of its victim and kind."""
    wrong = [
        hit.record()
        for hit in hits
        if (hit.fault.kind == "delay" and hit.outcome not in {"unharmed", "unharmed, done"})
        or (hit.fault.kind != "delay" and hit.outcome not in EXPECTED[hit.fault.victim, hit.fault.kind])
    ]
    assert not wrong, wrong


def test_the_whole_soak_hits_every_cell_twice():
    hits = Counter((fault.phase, fault.victim, fault.kind) for fault in all_faults(2 * len(CELLS)))
    assert len(hits) == len(PHASES) * len(VICTIMS) * len(KINDS) == 112
    assert set(hits.values()) == {2}


def test_a_few_faults_in_one_run_cost_no_step_and_no_bit(tmp_path):
    # Who is killed is heard of from the kernel: no patience is tried, and a busy machine need not try it either.
    with Soak(tmp_path, env={"SOAK_PATIENCE": "30"}) as soak:
        hits = [soak.strike(Fault(number=i, phase=p, victim=v, kind=k)) for i, (p, v, k) in enumerate(SHORT)]
        stop(soak)
    check_hits(hits)
    assert check_order(soak) == 0
    check_numbers(soak, undisturbed(soak.run, len(soak.steps)))
    checked = dynatrain("check", "one", cwd=tmp_path)
    assert checked.code == 0, checked
    assert "dp2 -> dp1" in checked.out
    mended = [json.loads(path.read_text()) for path in soak.run.path.glob("switches/*/loss.json")]
    assert len(mended) == 1
    assert all(path.with_name("plan.json").exists() for path in soak.run.path.glob("switches/*/loss.json"))


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_every_cell_of_phase_victim_and_kind_twice(tmp_path):
    wanted = all_faults(int(os.environ.get("SOAK_FAULTS", "0")) or 2 * len(CELLS))
    ledger = Path(os.environ.get("SOAK_LEDGER") or tmp_path / "ledger.jsonl")
    seconds = float(os.environ.get("SOAK_SECONDS", "600"))
    runs = int(os.environ.get("SOAK_RUNS", "2"))
    errors: list[BaseException] = []
    pieces = int(os.environ.get("SOAK_PIECES", "0")) or len(wanted)
    for piece in range(pieces):
        taken = {record["number"] for record in records(ledger)}
        left = [fault for fault in wanted if fault.number not in taken]
        if not left:
            break
        with ThreadPoolExecutor(runs) as pool:
            runs_of = [
                pool.submit(a_run, tmp_path / f"{piece}-{n}", left[n::runs], seconds, ledger) for n in range(runs)
            ]
        errors = [error for one in runs_of if (error := one.exception()) is not None]
        if errors:
            break
    sys.stdout.write(table(records(ledger)))
    assert not errors, errors


def a_run(place, faults, seconds, ledger):
    """One run with as many of these faults as there is time for; what they have shown is written down at its end."""
    if not faults:
        return
    end, hits = time.monotonic() + seconds, []
    failed = None
    with Soak(place) as soak:
        for fault in faults:
            if time.monotonic() > end:
                break
            try:
                hits.append(soak.strike(fault))
            except AssertionError as error:  # the others are looked at, and written down, all the same
                failed = AssertionError(f"{fault}: {error}")
                break
            sys.stderr.write(f"{json.dumps(hits[-1].record())}\n")
        if failed is None:
            stop(soak)
        check_hits(hits)
        again = check_order(soak)
    step = 1 + max(line["step"] for line in soak.steps)
    with alone(place, step) as (process, reference):
        assert process.wait(LIMIT + step) == 0
    check_numbers(soak, lines_of(reference))
    if failed is None:
        check_state(soak, reference, step)
        checked = dynatrain("check", "one", cwd=place)
        assert checked.code == 0, checked
    with ledger.open("a") as book:
        for hit in hits:
            book.write(json.dumps(hit.record() | {"run_steps": step, "run_redone": again}) + "\n")
    if failed is not None:
        raise failed


def records(ledger):
    return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []


def table(hits):
    """How often each cell was hit, and the slowest way back of each kind of fault."""
    count = Counter((hit["phase"], hit["victim"], hit["kind"]) for hit in hits)
    columns = [(victim, kind) for victim in VICTIMS for kind in KINDS]
    rows = [["phase", *(f"{victim} {kind}" for victim, kind in columns)]]
    rows += [[phase, *(str(count[phase, *column]) for column in columns)] for phase in PHASES]
    slowest = {
        column: max((hit["seconds"] for hit in hits if (hit["victim"], hit["kind"]) == column), default=0.0)
        for column in columns
    }
    rows.append(["slowest", *(f"{slowest[column]:.1f} s" for column in columns)])
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, wide, strict=True)).rstrip() for row in rows]
    runs = {(hit["run_steps"], hit["run_redone"]) for hit in hits}
    steps, again = sum(run[0] for run in runs), sum(run[1] for run in runs)
    text = "\n".join(lines)
    return f"{text}\n{len(hits)} faults in {steps} steps, {again} of them made again; patience {PATIENCE:g} s\n"
