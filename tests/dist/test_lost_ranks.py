"""``kill -9`` of a rank of a real run: real agent, real ranks, and the numbers of a run that nobody disturbs."""

import json
import os
import signal
import sys
import time

import pytest
from tests.cli import dynatrain
from tests.dist.paced import FALL
from tests.dist.test_crossing_runs import BATCH, CONFIG, SEED, SEQUENCE, STEPS, place, steps_of, training, until

from dynatrain.data.order import batch_ids
from dynatrain.data.prepare import open_samples
from dynatrain.observe.checkpoints import checkpoint_name, usable
from dynatrain.observe.log import Tail

__all__ = ["place"]

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(200)]


def events(run, kind):
    return [event for event in Tail(run.events).new() if event["kind"] == kind]


def kill(run, process, rank):
    """``kill -9`` of a rank; the last step before it, and the seconds until the others have made the next."""
    until(lambda: len(steps_of(run)) > 6, process)
    pid = events(run, "ranks_started")[0]["pids"][rank]
    before, began = steps_of(run)[-1]["step"], time.time()
    os.kill(pid, signal.SIGKILL)
    until(lambda: steps_of(run)[-1]["generation"] == 1, process, 90)
    first = next(line for line in steps_of(run) if line["generation"] == 1)
    return before, first["time"] - began


def test_a_run_goes_on_without_a_killed_rank_whose_shards_have_copies(place):
    (place / "run.toml").write_text(CONFIG.replace('layout = "fsdp2"', 'layout = "dp2.fsdp2"'))
    with training(place, "hit") as (process, run):
        _, seconds = kill(run, process, 3)
        until(lambda: steps_of(run)[-1]["step"] > 20, process)
        assert dynatrain("stop", "hit", cwd=place).code == 0
        said = process.communicate(timeout=60)[0]
        assert process.returncode == 75, said

    lines, samples = steps_of(run), open_samples(run.path, SEQUENCE)
    assert [line["step"] for line in lines] == list(range(len(lines)))
    for line in lines:
        assert line["samples"] == batch_ids(SEED, line["step"], BATCH, len(samples)).tolist()
    (loss,) = events(run, "loss")
    sys.stdout.write(
        f"{seconds:.2f} s from the kill to the end of the next step; {loss['seconds']:.2f} s from the news\n"
    )
    assert loss["lost"] == [{"rank": 3, "member": 3}]
    assert "was killed by SIGKILL, in phase train, step" in loss["why"]
    assert (loss["step"], loss["redone"]["steps"]) == (loss["now"], 0)
    assert loss["bytes"]["copies"] > 0
    assert loss["bytes"]["keepers"] == loss["bytes"]["files"] == 0
    told = json.loads((run.switch(1) / "loss.json").read_text())
    assert told == {key: loss[key] for key in told}
    assert dynatrain("check", "hit", cwd=place).code == 0


def finished(place, name, code, **env):
    """What a run of 12 steps and four ranks, whose shards have copies, has said at its end."""
    copies = CONFIG.replace('layout = "fsdp2"', 'layout = "dp2.fsdp2"').replace(f"steps = {STEPS}", "steps = 12")
    (place / "run.toml").write_text(copies)
    with training(place, name, **env) as (process, run):
        said = process.communicate(timeout=90)[0]
    assert process.returncode == code, said
    (loss,) = events(run, "loss")
    assert loss["lost"] == [{"rank": 3, "member": 3}]
    assert [line["step"] for line in steps_of(run)] == list(range(12))
    assert usable(run.checkpoints / checkpoint_name(12))
    assert dynatrain("check", name, cwd=place).code == 0


@pytest.mark.parametrize("where", ["step", "save"])
def test_a_rank_killed_before_its_first_step_or_in_the_last_save_costs_nothing(place, where):
    finished(place, where, 0, **{FALL: f"3 {where}"})


def test_a_rank_killed_while_the_run_is_parked_ends_it_saved(place):
    (place / "run.toml").write_text(CONFIG.replace('layout = "fsdp2"', 'layout = "dp2.fsdp2"'))
    with training(place, "away") as (process, run):
        until(lambda: len(steps_of(run)) > 3, process)
        assert dynatrain("park", "away", cwd=place).code == 0
        os.kill(events(run, "ranks_started")[0]["pids"][3], signal.SIGKILL)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 75, said
    assert "was killed by SIGKILL, in phase parked" in said
    assert usable(run.checkpoints / checkpoint_name(1 + steps_of(run)[-1]["step"]))
    assert dynatrain("check", "away", cwd=place).code == 0


def test_a_run_without_copies_says_what_is_missing_and_ends_with_3(place):
    with training(place, "bare") as (process, run):
        until(lambda: len(steps_of(run)) > 3, process)
        os.kill(events(run, "ranks_started")[0]["pids"][1], signal.SIGKILL)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 3, said
    assert "was killed by SIGKILL, in phase train" in said
    assert "of no step is everything left: step" in said
