"""``lend``, ``reclaim``, ``park`` and ``unpark`` on real runs: real agent, real ranks, real commands."""

import json
import os
import signal

import psutil
import pytest
from tests.cli import dynatrain
from tests.dist.test_crossing_runs import BATCH, SEED, SEQUENCE, place, steps_of, training, until

import dynatrain as library
from dynatrain.data.order import batch_ids
from dynatrain.data.prepare import open_samples
from dynatrain.observe.asked import NotDoneError
from dynatrain.observe.log import Tail

assert place  # a fixture

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(200)]


def events(run, kind):
    return [line for line in Tail(run.events).new() if line["kind"] == kind]


def growths(run):
    """Seconds from each request to reclaim to its answer."""
    times = {line["id"]: line["time"] for line in events(run, "request") if line["verb"] == "reclaim"}
    return [line["time"] - times[line["id"]] for line in events(run, "answer") if line["id"] in times]


def test_places_are_lent_and_reclaimed_and_all_state_is_parked_and_comes_back_while_requests_are_answered(place):
    with training(place, "one") as (process, run):
        until(lambda: len(steps_of(run)) > 3, process)
        asked = library.RunHandle(place / "runs" / "one", timeout=60)
        pids = events(run, "ranks_started")[0]["pids"]
        lent = asked.lend(ranks=[1])
        assert lent.message.endswith("; free, and kept until they are reclaimed: node 0 slot 1")
        assert not psutil.pid_exists(pids[1])
        assert "1 rank in world 1; lent: node 0 slot 1" in dynatrain("status", "one", cwd=place).out

        parked = dynatrain("park", "one", cwd=place)
        assert (parked.code, "the state is in host memory, and its device is free" in parked.out) == (0, True), parked
        steps = len(steps_of(run))
        assert "parked in host memory before step" in dynatrain("status", "one", cwd=place).out
        assert asked.park().outcome == "unchanged"
        for refused in (lambda: asked.switch("dp1"), asked.save, asked.reclaim):
            with pytest.raises(NotDoneError, match="the run is parked: its state is in host memory; unpark it first"):
                refused()
        assert len(steps_of(run)) == steps
        assert asked.unpark().outcome == "done"
        assert asked.unpark().outcome == "unchanged"
        until(lambda: len(steps_of(run)) > steps + 3, process)

        back = dynatrain("reclaim", "one", "--json", cwd=place)
        assert (back.code, back.record["outcome"], back.record["world"]["size"]) == (0, "done", 2)
        assert back.record["certificate"]["to"] == "fsdp2"
        until(lambda: steps_of(run)[-1]["generation"] > 2, process)
        asked.park()
        stopped = asked.stop()  # brings the state back, and saves it
        assert "saved in" in stopped.message
        process.communicate(timeout=30)
        assert process.returncode == 75

    lines, samples = steps_of(run), open_samples(run.path, SEQUENCE)
    assert [line["step"] for line in lines] == list(range(len(lines)))
    for line in lines:
        assert line["samples"] == batch_ids(SEED, line["step"], BATCH, len(samples)).tolist()
    checked = dynatrain("check", "one", cwd=place)
    assert checked.code == 0, checked
    verbs = [json.loads((folder / "certificate.json").read_text()) for folder in sorted(run.switches.iterdir())]
    assert [(one["cause"]["verb"], one["outcome"]) for one in verbs] == [
        ("lend", "committed"),
        ("park", "committed"),
        ("unpark", "committed"),
        ("reclaim", "committed"),
        ("park", "committed"),
        ("unpark", "committed"),
    ]


def test_from_4_to_2_to_4_to_2_to_4_with_leavers_that_halt_and_newcomers_on_their_very_places(place):
    """Leavers stop themselves when they have left, and are killed. How long each growth takes: benchmarks/loans.py."""
    with training(place, "four", "--layout=fsdp4", entry="clinging:main") as (process, run):
        until(lambda: len(steps_of(run)) > 3, process)
        asked = library.RunHandle(place / "runs" / "four", timeout=60)
        for _ in range(2):
            lent = asked.lend(count=2)
            assert lent.message.endswith("reclaimed: node 0 slot 2, node 0 slot 3")
            until(lambda: steps_of(run)[-1]["layout"] == "fsdp2", process)
            asked.reclaim()
            until(lambda: steps_of(run)[-1]["layout"] == "fsdp4", process)
        took = growths(run)
        assert len(events(run, "overdue")) == 4
        assert len(took) == 2
        assert max(took) < 30, took  # a hang guard
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert os.listdir(run.switches)  # noqa: PTH208
