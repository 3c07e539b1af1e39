"""Members come and go under the real agent: ranks that follow the protocol by hand, and ranks that break it."""

import json
import os
import signal
import time
from contextlib import ExitStack

import psutil
import pytest
from tests.dist.agents import JOIN, RunningAgent, agent, gone, until
from tests.dist.test_torchrun import two_agents

from dynatrain.observe.requests import Answer, Request, new_id, submit, wait_answer

CROSS = "tests.dist.crossers:cross"


def faults(**by_member: str) -> str:
    return json.dumps({name.removeprefix("m"): fault for name, fault in by_member.items()})


def ask(run: RunningAgent, *, seconds: float = 20.0, **arguments: object) -> Answer:
    """Ask for other members and wait for the answer."""
    run.pids()
    number = new_id()
    submit(run.run.requests, Request(id=number, verb="scale", arguments=arguments))
    answer = wait_answer(run.run.requests, number, seconds)
    assert answer is not None, f"no answer to {arguments} within {seconds} s"
    return answer


def crossings(run: RunningAgent) -> list[tuple[str, list[int]]]:
    """Stages and members, as the events tell them."""
    return [(event["stage"], event["members"]) for event in run.events("crossing")]


def living(run: RunningAgent) -> list[int]:
    """Members whose processes live."""
    pids = {event["pid"]: event["member"] for event in run.events("newcomer")}
    pids |= {
        pid: rank
        for event in run.events("ranks_started")
        for rank, pid in zip(event["ranks"], event["pids"], strict=True)
    }
    return sorted(pids[process.pid] for process in run.below() if process.pid in pids)


def stop(run: RunningAgent, code: int = 0) -> str:
    submit(run.run.requests, Request(id=new_id(), verb="stop"))
    ended, said, _ = run.end()
    assert ended == code, said
    return said


def test_a_run_grows_and_shrinks_and_ranks_that_left_are_gone_when_it_is_said_to_be_done(tmp_path):
    with agent(tmp_path / "run", CROSS, 2) as run:
        assert ask(run, size=4) == Answer(outcome="done", message="dp4")
        assert living(run) == [0, 1, 2, 3]
        assert ask(run, size=4).outcome == "unchanged"
        assert ask(run, leave=[0, 2]) == Answer(outcome="done", message="dp2")
        assert living(run) == [1, 3]
        assert ask(run, size=3, layout="tp3", mode="tight") == Answer(outcome="done", message="tp3")
        assert living(run) == [1, 3, 4]
        refused = ask(run, size=7)
        assert (refused.outcome, refused.message) == ("refused", "7 ranks: at most 6; nearest: 6")
        assert ask(run, leave=[3]).message == "there are no ranks [3]; the run has 0 to 2"
        assert "one stays" in ask(run, leave=[0, 1, 2], size=2).message
        stop(run)
        new = [[0, 1, 2, 3], [1, 3], [1, 3, 4]]
        assert crossings(run) == [(stage, members) for members in new for stage in ("coming", "asked", "done")]
        told = [json.loads(line) for line in run.run.log(4).read_text().splitlines()]
        assert told == [{"member": 4, "world": [1, 3, 4], "layout": "tp3", "generation": 3}]
        ends = {end["member"]: end["rank"] for end in run.events("rank_ended")}
        assert sorted(ends) == [0, 1, 2, 3, 4]
        assert (ends[1], ends[3], ends[4]) == (0, 1, 2)
        assert run.events("agent_ended")[0]["generation"] == 3


@pytest.mark.sweep
def test_newcomers_that_die_or_keep_silent_cost_nothing_and_the_next_request_is_taken(tmp_path):
    with agent(tmp_path / "run", CROSS, 2, 3.0, FAULTS=faults(m2="dies", m3="silent", m4="halts")) as run:
        died = ask(run, size=3)
        assert died.outcome == "aborted"
        assert "member 2 (process" in died.message
        assert "raised ImportError: planted: no module named moe before it had joined" in died.message
        silent = ask(run, size=3)
        assert silent.outcome == "aborted"
        assert "no sign of life for 3 s from member 3" in silent.message
        halted = ask(run, size=3)
        assert halted.outcome == "aborted"
        assert "no sign of life for 3 s from member 4 (process" in halted.message
        assert ", halted)" in halted.message
        assert living(run) == [0, 1]
        assert ask(run, size=3).outcome == "done"
        assert living(run) == [0, 1, 5]
        stop(run)
        assert not run.events("run_failed")


@pytest.mark.sweep
def test_leavers_that_do_not_end_are_killed_and_their_place_is_taken_again(tmp_path):
    with agent(tmp_path / "run", CROSS, 2, FAULTS=faults(m1="clings", m2="breaks")) as run:
        run.pids()
        began = time.monotonic()
        assert ask(run, size=1).outcome == "done"
        assert time.monotonic() - began < 5
        assert [event["member"] for event in run.events("overdue")] == [1]
        assert living(run) == [0]
        assert ask(run, size=2).outcome == "done"
        assert json.loads(run.run.log(2).read_text().splitlines()[0])["world"] == [0, 2]
        assert ask(run, size=1).outcome == "done"  # member 2 ends with an error when all was over
        stop(run)
        assert not run.events("run_failed")


@pytest.mark.sweep
def test_one_crossing_at_a_time_and_what_ranks_refuse_leaves_the_world_as_it_was(tmp_path):
    with agent(tmp_path / "run", CROSS, 2, FAULTS=faults(m2="slow")) as run:
        run.pids()
        folder = run.run.requests
        for name, size in (("a", 3), ("b", 1)):
            submit(folder, Request(id=name, verb="scale", arguments={"size": size}))
        assert wait_answer(folder, "b", 20) == Answer(outcome="done", message="dp1")
        assert wait_answer(folder, "a", 0) == Answer(outcome="done", message="dp3")
        assert [members for stage, members in crossings(run) if stage == "done"] == [[0, 1, 2], [0]]
        stop(run)


@pytest.mark.sweep
def test_a_crossing_that_the_ranks_abort_leaves_the_world_as_it_was(tmp_path):
    with agent(tmp_path / "run", CROSS, 2, FAULTS=faults(m0="objects")) as run:
        assert ask(run, size=3) == Answer(outcome="aborted", message="planted: no memory")
        assert living(run) == [0, 1]
        assert crossings(run)[-1] == ("undone", [0, 1, 2])
        stop(run)


@pytest.mark.parametrize(
    ("number", "fault"),
    [(signal.SIGINT, "slow"), pytest.param(signal.SIGTERM, "halts", marks=pytest.mark.sweep)],
)
def test_a_signal_during_a_crossing_ends_everybody_within_5_seconds(tmp_path, number, fault):
    with agent(tmp_path / "run", CROSS, 2, FAULTS=faults(m2=fault)) as run:
        run.pids()
        submit(run.run.requests, Request(id="a", verb="scale", arguments={"size": 3}))
        wanted = "coming" if fault == "slow" else "asked"
        until(lambda: wanted in dict(crossings(run)))
        below = run.below()
        run.send(number)
        code, _, seconds = run.end()
        assert (code, seconds < 5) == (128 + number, True)
        assert gone(below, seconds=0)
        assert crossings(run)[-1][0] == "undone"
        assert "stopping" in wait_answer(run.run.requests, "a", 0).message


@pytest.mark.sweep
def test_a_newcomer_that_is_killed_after_it_joined_ends_the_run_as_any_rank(tmp_path):
    with agent(tmp_path / "run", CROSS, 1) as run:
        assert ask(run, size=2).outcome == "done"
        os.kill(run.events("newcomer")[0]["pid"], signal.SIGKILL)
        code, said, _ = run.end()
        assert (code, "rank 1 (process" in said) == (3, True)


@pytest.mark.sweep
def test_two_agents_take_newcomers_on_the_second_node_and_let_them_go(tmp_path):
    with ExitStack() as stack:
        first, second = two_agents(stack, tmp_path / "run", CROSS, 2)
        until(lambda: len(first.events("ranks_started")) == 2, 60)
        assert ask(first, size=4).outcome == "done"
        pids = {event["member"]: event["pid"] for event in first.events("newcomer")}
        assert set(pids) == {2, 3}
        on_second = [m for m, pid in pids.items() if psutil.Process(pid) in second.below()]
        assert len(on_second) == 1
        (leaver,) = on_second
        world = first.events("crossing")[-1]["members"]
        ranks = [world.index(1), world.index(leaver)]  # node 1 has none then
        assert ask(first, leave=ranks).outcome == "done"
        assert not any(psutil.pid_exists(pids[leaver]) for _ in (0,))
        assert ask(first, size=3).outcome == "done"
        assert len(first.events("newcomer")) == 3
        below = first.below() + second.below()
        submit(first.run.requests, Request(id="stop", verb="stop"))
        assert [run.end(60)[0] for run in (first, second)] == [0, 0]
        assert gone(below)


def test_a_notice_to_one_of_two_hosts_takes_it_out_with_code_0_and_the_run_goes_on(tmp_path):
    with ExitStack() as stack:
        first, second = two_agents(stack, tmp_path / "run", CROSS, 4, GRACE="20")
        until(lambda: len(first.events("ranks_started")) == 2, 60)
        below = second.below()
        second.send(signal.SIGTERM)
        second.end(30)
        assert gone(below)
        assert [event["exit"] for event in first.events("agent_ended")] == [0]
        assert [event["node"] for event in until(lambda: first.events("host_left"))] == [1]
        assert living(first) == [0, 1]
        assert ask(first, size=3).outcome == "done"  # and newcomers come to the host that is left
        assert len(living(first)) == 3
        below = first.below()
        first.send(signal.SIGTERM)
        first.end(30)
        assert [event["exit"] for event in first.events("agent_ended")] == [0, 75]
        assert gone(below)


def test_a_spare_waits_in_its_place_and_is_called_to_the_next_world(tmp_path):
    with agent(tmp_path / "run", CROSS, 1, SPARES="1") as run:
        (spare,) = until(lambda: run.events("newcomer"))
        until(lambda: psutil.Process(spare["pid"]).num_threads() > 1)  # its heart
        assert living(run) == [0, 1]
        assert ask(run, size=2).outcome == "done"
        told = [json.loads(line) for line in run.run.log(1).read_text().splitlines()]
        assert told == [{"member": 1, "world": [0, 1], "layout": "dp2", "generation": 1}]
        until(lambda: living(run) == [0, 1, 2])
        below = run.below()
        stop(run)
        assert gone(below)


def test_an_agent_joins_and_takes_ranks_a_second_one_is_refused_and_a_notice_takes_it_out_again(tmp_path):
    folder = tmp_path / "run"
    with ExitStack() as stack:
        first = stack.enter_context(agent(folder, CROSS, 1))
        first.pids()
        joined = stack.enter_context(agent(folder, CROSS, 1, main=JOIN, PLACE="pod-7"))
        until(lambda: ("done", [0, 1]) in crossings(first))
        (newcomer,) = first.events("newcomer")
        assert psutil.Process(newcomer["pid"]) in joined.below()
        second = stack.enter_context(agent(folder, CROSS, 1, main=JOIN, PLACE="pod-7"))
        code, said, _ = second.end()
        assert (code, "the place 'pod-7' is taken by process" in said) == (2, True), said
        assert "is taken by" in first.events("join_refused")[0]["reason"]
        below = joined.below()
        joined.send(signal.SIGTERM)
        code, said, _ = joined.end()
        assert (code, gone(below)) == (0, True), said
        assert crossings(first)[-1] == ("done", [0])
        assert len(first.events("host_joined")) == 1
        assert ask(first, size=2).outcome == "done"
        stop(first)
        assert not (folder / "join.json").exists()
        assert not first.events("run_failed")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("env", "reason"),
    [({"CODE": "c1"}, "another code: c1, the run has c0"), ({"TOKEN": "guessed"}, "does not have the run's token")],
)
def test_who_is_not_of_the_run_is_refused_on_both_sides_and_the_run_goes_on(tmp_path, env, reason):
    folder = tmp_path / "run"
    with agent(folder, CROSS, 1) as first:
        first.pids()
        with agent(folder, CROSS, 1, main=JOIN, **env) as other:
            code, said, _ = other.end()
        assert (code, reason in said) == (2, True), said
        assert reason in first.events("join_refused")[0]["reason"]
        assert ask(first, size=2).outcome == "done"
        stop(first)


@pytest.mark.sweep
@pytest.mark.parametrize("told", [(0, 1), (1, 0), (0,)])
def test_a_notice_to_node_0_stops_the_run_saved_on_all_whoever_else_is_told(tmp_path, told):
    with ExitStack() as stack:
        runs = two_agents(stack, tmp_path / "run", CROSS, 2, GRACE="20")
        until(lambda: len(runs[0].events("ranks_started")) == 2, 60)
        below = [process for run in runs for process in run.below()]
        for node in told:
            runs[node].send(signal.SIGTERM)
            time.sleep(0.3)
        for run in runs:
            run.end(40)
        assert [event["exit"] for event in runs[0].events("agent_ended")] == [75, 75]
        assert not runs[0].events("crossing")
        assert gone(below)


@pytest.mark.sweep
def test_a_notice_stops_the_run_saved_where_the_others_cannot_go_on(tmp_path):
    with ExitStack() as stack:
        runs = two_agents(stack, tmp_path / "run", CROSS, 2, GRACE="20", FAULTS=faults(m0="objects"))
        until(lambda: len(runs[0].events("ranks_started")) == 2, 60)
        runs[1].send(signal.SIGTERM)
        said = [run.end(40)[1] for run in runs]
        assert [event["exit"] for event in runs[0].events("agent_ended")] == [75, 75]
        assert "planted: no memory" in said[0], said
