"""An agent, its fork server and its ranks as real processes: how runs start and how they end."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.dist.agents import agent, gone, listening, open_ports, until

from dynatrain.cluster.interrupts import SAME_SECONDS
from dynatrain.observe.requests import Answer, Request, submit, wait_answer

SEGMENTS = Path("/dev/shm")  # noqa: S108 - only looked at


def test_a_run_whose_ranks_end_well_ends_with_0_and_tells_how_long_its_start_took(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "short", 4) as run:
        code, said, _ = run.end()
        assert (code, "4 ranks on cpu (gloo)" in said) == (0, True)
        seconds = run.events("ranks_started")[0]["seconds"]
        sys.stdout.write(f"fork server ready and 4 ranks forked after: {seconds} s\n")
        assert seconds["fork"] < 1.0
        assert [end["code"] for end in run.events("rank_ended")] == [0] * 4
        assert run.run.agent().exit == 0
        assert [json.loads(run.run.log(r).read_text())["left_at"] for r in range(4)] == [5] * 4


def test_a_rank_has_its_own_session_and_nothing_of_the_launchers_environment(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "notices", RANK="0", MASTER_ADDR="nowhere") as run:
        assert run.end()[0] == 0
        realtime = run.events("agent_started")[0]["realtime"]
        for rank in range(2):
            seen = json.loads(run.run.log(rank).read_text())
            context = json.loads(seen["context"])
            assert seen["sid"] == seen["pid"]
            assert seen["env"] == []
            assert (context["rank"], context["device"], context["backend"]) == (rank, "cpu", "gloo")
            assert seen["scheduling"] == (os.SCHED_RR if realtime else os.SCHED_OTHER)


def test_ctrl_c_stops_all_ranks_at_one_step_edge_and_nothing_is_left(tmp_path: Path) -> None:
    segments = set(SEGMENTS.iterdir())
    with agent(tmp_path / "run", "train") as run:
        pids = run.until_training()
        below = run.below()
        ports = listening([psutil.Process(run.process.pid), *below])
        assert set(pids) < {process.pid for process in below}
        assert ports
        for process in below:  # as a scheduler does that signals all processes at once: the agent alone decides
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
        run.send(signal.SIGINT)
        code, said, seconds = run.end()
        assert (code, seconds < 5) == (130, True)
        assert "stopping at the next step edge" in said
        assert gone(below, seconds=0)
        assert not ports & open_ports()
        assert set(SEGMENTS.iterdir()) <= segments
        edges = {json.loads(run.run.log(rank).read_text())["left_at"] for rank in range(2)}
        assert len(edges) == 1
        assert run.run.agent().exit == 130


def test_ranks_and_helpers_that_ignore_sigterm_are_gone_within_5_seconds(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "stubborn") as run:
        until(lambda: all(run.run.log(rank).exists() and run.run.log(rank).read_text() for rank in range(2)))
        below = run.below()
        assert len(below) == 5  # the server, two ranks, two helpers
        run.send(signal.SIGTERM)
        code, _, seconds = run.end()
        assert (code, seconds < 5) == (143, True)
        assert gone(below, seconds=0)


@pytest.mark.sweep
def test_a_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "stubborn") as run:
        run.pids()
        below = run.below()
        run.send(signal.SIGINT)
        run.send(signal.SIGINT)  # the same wish
        time.sleep(SAME_SECONDS + 0.1)
        assert run.process.poll() is None
        run.send(signal.SIGINT)
        code, _, seconds = run.end()
        assert (code, seconds < 2) == (130, True)
        assert gone(below, seconds=0)


def test_a_signal_before_the_ranks_are_there_ends_the_agent_too(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "train") as run:
        until(run.below)
        run.send(signal.SIGINT)
        code, _, seconds = run.end()
        assert (code, seconds < 5) == (130, True)


def test_a_killed_agent_takes_its_ranks_with_it(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "stubborn") as run:
        until(lambda: all(run.run.log(rank).exists() and run.run.log(rank).read_text() for rank in range(2)))
        below = run.below()
        run.send(signal.SIGKILL)
        run.process.wait()
        assert gone(below)
        assert run.run.agent().liveness() == "gone"


def test_a_killed_rank_is_named_with_its_phase_and_not_its_neighbours(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "train", 3) as run:
        pids = run.until_training()
        below = run.below()
        os.kill(pids[1], signal.SIGKILL)
        code, said, seconds = run.end()
        assert (code, seconds < 5) == (3, True)
        assert f"rank 1 (process {pids[1]}) was killed by SIGKILL, in phase train, step " in said
        assert run.events("run_failed")[0]["reason"] in said
        assert gone(below, seconds=0)


def test_a_rank_that_raises_is_named_with_its_error_and_phase(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "raises", 3) as run:
        code, said, _ = run.end()
        assert code == 3
        assert "rank 1 (process" in said
        assert "raised ValueError: planted: no such layout, in phase move of switch 3, step 7" in said
        assert "Traceback" in run.run.log(1).read_text()


def test_a_halted_rank_is_named_when_patience_ends_and_the_others_leave_their_stacks(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "train", 2, 2.0) as run:
        pids = run.until_training()
        below = run.below()
        os.kill(pids[1], signal.SIGSTOP)
        code, said, seconds = run.end()
        assert (code, seconds < 7) == (3, True)
        assert f"no sign of life for 2 s from rank 1 (process {pids[1]}, halted), last seen in phase train" in said
        assert "rank 0" not in said
        assert "all_reduce" in run.run.log(0).read_text()
        assert gone(below, seconds=0)


@pytest.mark.sweep
def test_a_rank_halted_for_less_than_the_patience_costs_nothing(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "train") as run:
        pids = run.until_training()
        os.kill(pids[1], signal.SIGSTOP)
        until(lambda: run.events("rank_stopped"))
        os.kill(pids[1], signal.SIGCONT)
        until(lambda: run.events("rank_continued"))
        run.send(signal.SIGINT)
        assert run.end()[0] == 130
        assert not run.events("run_failed")


@pytest.mark.sweep
def test_a_rank_that_never_sits_down_is_silent(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "silent", 1, 1.0) as run:
        code, said, _ = run.end()
        assert (code, "no sign of life for 1 s from rank 0" in said) == (3, True)


def test_a_rank_that_ends_well_before_the_others_is_a_failure(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "leaves", 3, 1.5) as run:
        code, said, _ = run.end()
        assert (code, "ranks 0, 2 did not end within 1.5 s of the others" in said) == (3, True)


def test_helpers_of_a_dead_rank_do_not_outlive_the_run(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "orphan_maker") as run:
        code, said, _ = run.end()
        helper = json.loads(run.run.log(0).read_text())["helper"]
        assert (code, "rank 0" in said, "ended with code 9" in said) == (3, True, True)
        assert not psutil.pid_exists(helper)


@pytest.mark.sweep
def test_a_killed_fork_server_ends_the_run(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "train") as run:
        run.until_training()
        below = run.below()
        server = next(process for process in below if process.ppid() == run.process.pid)
        server.kill()
        code, said, _ = run.end()
        assert (code, "the fork server was killed" in said) == (3, True)
        assert gone(below)


@pytest.mark.sweep
def test_an_entry_that_cannot_be_imported_fails_with_its_error(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "nowhere") as run:
        code, said, _ = run.end()
        assert (code, "AttributeError: module 'tests.dist.toy' has no attribute 'nowhere'" in said) == (3, True)


def test_requests_reach_the_ranks_and_their_answers_the_folder(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "train") as run:
        run.until_training()
        folder = run.run.requests
        submit(folder, Request(id="a", verb="switch", arguments={"layout": "dp2"}))
        assert wait_answer(folder, "a", 5) == Answer(outcome="unchanged", message="dp2")
        submit(folder, Request(id="a", verb="switch", arguments={"layout": "dp2"}))
        (folder / "bad.json").write_text("{")
        assert wait_answer(folder, "bad", 5).outcome == "refused"
        submit(folder, Request(id="b", verb="stop"))
        assert wait_answer(folder, "b", 5).outcome == "done"
        assert run.end()[0] == 0
        assert [event["id"] for event in run.events("request")] == ["a", "b"]


def test_a_second_agent_on_the_same_run_is_refused_and_a_dead_one_is_followed(tmp_path: Path) -> None:
    with agent(tmp_path / "run", "silent", 1) as first:
        first.pids()
        submit(first.run.requests, Request(id="left", verb="stop"))
        with agent(tmp_path / "run", "short", 1) as second:
            code, said, _ = second.end()
            assert code != 0
            assert f"is driven by process {first.process.pid}" in said
        first.send(signal.SIGKILL)
        first.process.wait()
        with agent(tmp_path / "run", "short", 1) as third:
            assert third.end()[0] == 0
            assert third.run.agent().attempt == 1
            assert wait_answer(third.run.requests, "left", 0).outcome == "failed"
