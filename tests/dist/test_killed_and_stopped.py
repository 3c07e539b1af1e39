"""Ranks that are killed or stopped inside a switch, under the real agent."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict

import pytest
from tests.dist.agents import MAIN, ROOT, RunningAgent, environment, until
from tests.dist.faulty_rank import FAULTS
from tests.dist.trained import FLIPPED, SHAPE

from dynatrain.config.run import RunConfig
from dynatrain.config.toml import to_toml
from dynatrain.data.prepare import Request as DataRequest
from dynatrain.data.prepare import prepare
from dynatrain.observe.log import Tail
from dynatrain.observe.requests import Request, submit, wait_answer
from dynatrain.observe.run import RunFolder
from dynatrain.space.hf_config import written_config

MODES = ("keep", "tight")
_BEFORE = ("build", "warm", "quiesce")
ROUND_EVENTS = ("round_start", "posted", "received", "agreed")
EVERYWHERE = tuple(
    [
        (event, None, rank)
        for event in ("build", "warm", "quiesce", "move", "bound", "check", "commit")
        for rank in range(2)
    ]
    + [(event, place, rank) for place in ("first", "last") for event in ROUND_EVENTS for rank in range(2)]
    + [(event, "middle", number % 2) for number, event in enumerate(ROUND_EVENTS)]
)
"""``(event, round, rank)``."""
PHASES = tuple((event, "middle" if event == "posted" else None) for event in (*_BEFORE, "posted", "check", "commit"))
STEPS = 100_000
"""Until somebody ends the run; equal for all, since the learning rate depends on it."""
DEADLINE = 4.0
START = 120.0
"""Seconds for a fork server to import torch, on a machine that does much else."""
LAYOUTS = ("fsdp2", "dp2")
"""Training has equal bits in both."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with a model's config and tokens."""
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    text.write_text("\n".join(f"{i} and {i * i} make {i + i * i}" for i in range(2000)))
    (folder / "config.json").write_text(json.dumps(written_config(asdict(SHAPE) | {"vocab_size": 257})))
    prepare(DataRequest(paths=(str(text),), tokenizer="bytes", validation=0.0), folder)
    return folder


def new_run(path, prepared, *, steps, deadline=DEADLINE, faults=(), switches=(), mode="keep"):
    config = RunConfig.model_validate(
        {
            "layout": LAYOUTS[0],
            "steps": steps,
            "model": {"config": str(prepared / "config.json")},
            "data": {"tokenizer": "bytes", "sequence": 32, "validation": 0.0, "paths": (str(prepared / "text.txt"),)},
            "batch": {"global_sequences": 2, "micro_sequences": 1},
            "optimizer": {"exact_norm": True},
            "switching": {"mode": mode, "deadline_seconds": deadline},
            "switch": tuple({"step": step, "layout": layout} for step, layout in switches),
        }
    )
    run = RunFolder.create(path, config=to_toml(config), environment={})
    for file in prepared.iterdir():
        if file.suffix in {".json", ".npy"} and file.name != "config.json":
            shutil.copy(file, path)
    (path / FAULTS).write_text(json.dumps([{"round": None, "switch": 1, **fault} for fault in faults]))
    return run


@contextmanager
def started(run, liveness=20.0):
    command = [sys.executable, str(MAIN), str(run.path), "tests.dist.faulty_rank:main", "2", str(liveness)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        yield RunningAgent(process, run)
    finally:
        if process.poll() is None:
            process.kill()  # its ranks and their parent end with it
        process.communicate()


def switch_events(run):
    return [event["phase"] for event in Tail(run.events).new() if event["kind"] == "switch"]


def steps_of(run):
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in Tail(run.metrics).new()}


def side_by_side(work, items):
    """Two at a time: mostly they wait."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, items))


def phase_named(event):
    return "move" if event in {*ROUND_EVENTS, "bound"} else event


def killed(folder, prepared, mode, event, number=None, victim=1):
    fault = {"event": event, "round": number, "rank": victim, "signal": "SIGKILL"}
    name = f"{mode}-{event}-{number}-{victim}"
    run = new_run(folder / name, prepared, steps=STEPS, faults=[fault], mode=mode)
    with started(run) as agent:
        until(lambda: agent.events("ranks_started"), START)
        submit(run.requests, Request(id="it", verb="switch", arguments={"layout": LAYOUTS[1]}))
        code, said, _ = agent.end(60)
        end = next(e for e in agent.events("rank_ended") if e["signal"] == "SIGKILL" and not e["by_agent"])
        fell = agent.events("run_failed")[0]
        answer = wait_answer(run.requests, "it", 0)
    where = f"{name}: {said}"
    assert code == 3, where
    assert (
        f"rank {victim} (process {end['pid']}) was killed by SIGKILL, in phase {phase_named(event)} of switch 1" in said
    )
    assert fell["time"] - end["time"] < 5, where
    assert "committed" not in switch_events(run), where
    assert answer.outcome in {"aborted", "failed"}, f"{where}: {answer}"


def halted_for_good(folder, prepared, mode):
    fault = {"event": "quiesce", "rank": 1, "signal": "SIGSTOP"}
    run = new_run(folder / mode, prepared, steps=STEPS, deadline=2.0, faults=[fault], mode=mode)
    with started(run, liveness=5.0) as agent:
        until(lambda: agent.events("ranks_started"), START)
        submit(run.requests, Request(id="it", verb="switch", arguments={"layout": LAYOUTS[1]}))
        code, said, _ = agent.end(60)
    return code, said, switch_events(run)


@pytest.fixture(scope="module")
def patience(prepared, tmp_path_factory):
    """What comes of ranks that are halted for good, by mode: begun beside another test, as such runs mostly wait."""
    with ThreadPoolExecutor(len(MODES)) as pool:
        folder = tmp_path_factory.mktemp("patience")
        yield {mode: pool.submit(halted_for_good, folder, prepared, mode) for mode in MODES}


@pytest.mark.usefixtures("patience")
def test_a_rank_killed_in_any_phase_ends_the_run_with_3_and_is_named_with_phase_and_switch(prepared, tmp_path):
    # Before the ranks quiesce the modes have one course.
    at = [
        (mode, *point)
        for mode in MODES
        for point in PHASES
        if (mode, point[0]) not in {("tight", "build"), ("keep", "warm")}
    ]
    side_by_side(lambda one: killed(tmp_path, prepared, *one), at)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_each_rank_killed_anywhere_ends_the_run_with_3_and_is_named_with_phase_and_switch(prepared, tmp_path):
    every = [(mode, *point) for mode in MODES for point in EVERYWHERE]
    side_by_side(lambda at: killed(tmp_path, prepared, *at), every)


def stopped(folder, prepared, mode, points):
    """Stop a rank at each of ``(event, round, rank, seconds)`` in turn, one switch after the other.

    Returns:
        The answers, one more than there are points: the last switch is left alone; and ``{step: (loss, norm)}``.
    """
    faults = [
        {"event": event, "round": number, "rank": rank, "signal": "SIGSTOP", "switch": switch}
        for switch, (event, number, rank, _) in enumerate(points, 1)
    ]
    run = new_run(folder / mode, prepared, steps=STEPS, faults=faults, mode=mode)
    answers, here = [], 0
    with started(run) as agent:
        pids = until(lambda: agent.events("ranks_started"), START)[0]["pids"]
        for number, (_, _, rank, seconds) in enumerate([*points, (None, None, 0, 0)]):
            submit(run.requests, Request(id=f"r{number}", verb="switch", arguments={"layout": LAYOUTS[1 - here]}))
            if seconds:
                until(lambda wanted=number + 1: len(agent.events("rank_stopped")) == wanted, 60)
                time.sleep(seconds)
                os.kill(pids[rank], signal.SIGCONT)
            answers.append(wait_answer(run.requests, f"r{number}", 60))
            here = 1 - here if answers[-1].outcome == "done" else here
        events = switch_events(run)
        submit(run.requests, Request(id="same", verb="switch", arguments={"layout": LAYOUTS[here]}))
        assert wait_answer(run.requests, "same", 60).outcome == "unchanged"
        done = len(steps_of(run))
        until(lambda: len(steps_of(run)) > done + 2)
        assert switch_events(run) == events  # it was not even announced
        agent.send(signal.SIGINT)
        code, said, _ = agent.end(30)
    assert code == 130, said
    return answers, steps_of(run)


def stop_everywhere(folder, prepared, points):
    """Stop ranks at ``points[mode]`` in both modes, and hold outcomes, names and bits to what was promised."""
    undisturbed = new_run(folder / "undisturbed", prepared, steps=STEPS)
    with started(undisturbed) as agent:  # beside the others, while they wait
        results = side_by_side(lambda mode: stopped(folder, prepared, mode, points[mode]), MODES)
        longest = max(len(steps) for _, steps in results)
        until(lambda: len(steps_of(undisturbed)) >= longest, START + longest)
        agent.send(signal.SIGINT)
        assert agent.end(30)[0] == 130
    for mode, (answers, _) in zip(MODES, results, strict=True):
        for (event, number, rank, seconds), answer in zip([*points[mode], ("", 0, 0, 0)], answers, strict=True):
            where = f"{mode} {event} {number} on rank {rank} for {seconds} s: {answer}"
            late = seconds > DEADLINE
            # Rank 0 announces, and begins: where others have not heard of it yet, they wait for a step and no switch.
            unheard = (event, rank) == ("build", 0) and answer.outcome == "done"
            assert answer.outcome == ("aborted" if late and not unheard else "done"), where
            named = f"rank {rank}" in answer.message or f"ranks [{rank}]" in answer.message
            assert named or not late or unheard, where
    # Neither the aborted switches nor the committed ones changed a bit of any step.
    expected = steps_of(undisturbed)
    for _, steps in results:
        assert {step: expected[step] for step in steps} == steps


SHORT = 0.5
LONG = DEADLINE + 2.0
"""Beyond the deadline of one phase and the longest step, which comes on top, within the next one's: the way back waits
as long again."""


def test_a_stopped_rank_costs_nothing_before_the_deadline_and_the_switch_alone_after_it(prepared, tmp_path):
    points = {
        mode: [(*point, 1, LONG if number % 2 == MODES.index(mode) else SHORT) for number, point in enumerate(PHASES)]
        for mode in MODES
    }
    stop_everywhere(tmp_path, prepared, points)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_each_rank_stopped_anywhere_costs_nothing_or_the_switch_alone(prepared, tmp_path):
    every = [(*point, seconds) for point in EVERYWHERE for seconds in (SHORT, LONG)]
    stop_everywhere(tmp_path, prepared, dict.fromkeys(MODES, every))


def test_a_rank_still_stopped_when_the_agents_patience_ends_is_named_with_phase_and_switch(patience):
    for found in patience.values():
        code, said, events = found.result()
        assert code == 3, said
        assert "no sign of life for 5 s from rank 1" in said
        assert "halted), last seen in phase quiesce of switch 1" in said
        assert "committed" not in events


def test_a_switch_that_cannot_be_taken_back_stops_the_run_with_3_and_is_answered_as_failed(prepared, tmp_path):
    fault = {"event": "bound", "rank": 1, "signal": "flip"}
    run = new_run(tmp_path / "run", prepared, steps=STEPS, faults=[fault], mode="tight")
    with started(run) as agent:
        until(lambda: agent.events("ranks_started"), START)
        submit(run.requests, Request(id="it", verb="switch", arguments={"layout": LAYOUTS[1]}))
        code, said, _ = agent.end(60)
    answer = wait_answer(run.requests, "it", 0)
    assert code == 3, said
    assert f"SwitchFailedError: digests differ after the move: {FLIPPED} param on rank 1 in box" in said
    assert answer.outcome == "failed"
    assert f"{FLIPPED} param on rank 1 in box" in answer.message
    assert switch_events(run) == ["announce", "failed"]
    assert json.loads((run.switch(1) / "certificate.json").read_text())["outcome"] == "failed"
