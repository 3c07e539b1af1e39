"""The agent that leads a real run dies or is halted: real agents and ranks, and the numbers of a run left alone."""

import signal
import socket
import sys
import time
from contextlib import ExitStack

import pytest
from tests.dist.test_crossing_runs import BATCH, CONFIG, SEED, SEQUENCE, place, steps_of, training, until
from tests.pace import allowed

from dynatrain.app.runs import RunWorld
from dynatrain.data.order import batch_ids
from dynatrain.data.prepare import open_samples
from dynatrain.observe.log import Tail
from dynatrain.observe.requests import Request, new_id, submit, wait_answer

__all__ = ["place"]

pytestmark = pytest.mark.timeout(200)
PROMISE = 10.0
"""Seconds from the death of the agent that leads until the run trains again."""


def agents(stack, where, count, every, **env):
    """``count`` agents with a rank each, and their run, once it trains."""
    (where / "run.toml").write_text(CONFIG.replace("fsdp2", f"fsdp{count}") + f"[save]\nevery = {every}\n")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), **env}
    started = [stack.enter_context(training(where, "one", RANK=str(node), **told)) for node in range(count)]
    return [process for process, _ in started], started[0][1]


def events(run, kind):
    return [event for event in Tail(run.events).new() if event["kind"] == kind]


def of_attempt(run, attempt):
    return [line for line in steps_of(run) if line["attempt"] == attempt]


def ask(run, verb, **arguments):
    """Put a request into the run's folder; gives its number."""
    submit(run.requests, request := Request(id=new_id(), verb=verb, arguments=arguments))
    return request.id


def timeline(run):
    """The steps that count: of one that came twice, the later."""
    return list({line["step"]: line for line in steps_of(run)}.values())


def check(run):
    """Every sample once, and a step that was made again has the bits that it had."""
    lines, samples = timeline(run), open_samples(run.path, SEQUENCE)
    assert [line["step"] for line in lines] == list(range(len(lines)))
    for line in lines:
        assert line["samples"] == batch_ids(SEED, line["step"], BATCH, len(samples)).tolist()
    first = {line["step"]: line["loss"] for line in of_attempt(run, 0)}
    again = [line for line in steps_of(run) if line["attempt"] and line["step"] in first]
    assert all(abs(line["loss"] - first[line["step"]]) <= 1e-12 for line in again), (first, again)
    return lines, len(again)


def test_the_first_agent_is_killed_and_the_run_goes_on_by_itself_and_answers(place):
    with ExitStack() as stack:
        (first, second), run = agents(stack, place, 2, every=4, TESTS_SECONDS_A_STEP="0.05")
        until(lambda: run.exists and len(steps_of(run)) % 4 == 2 and run.checkpoints.is_dir(), first)
        began = time.time()
        first.kill()
        save = ask(run, "save")  # nobody leads
        line = until(lambda: of_attempt(run, 1), second)[0]
        seconds = line["time"] - began
        sys.stdout.write(f"{seconds:.2f} s from the kill to the end of the next step\n")
        assert seconds < allowed(PROMISE)
        assert wait_answer(run.requests, save, 20).outcome == "done"
        ask(run, "stop")
        assert second.wait(30) == 75
    (lost,), (taken,) = events(run, "lead_lost"), events(run, "succession")
    assert (lost["node"], lost["reason"]) == (1, "its connection was closed")
    assert (taken["attempt"], taken["layout"], taken["world_size"]) == (1, "dp1", 1)
    assert events(run, "load")[0]["step"] == line["step"] > 0
    _, again = check(run)
    assert again >= 1
    assert (run.agent().attempt, run.agent().exit) == (1, 75)
    assert RunWorld.of(run).text == "1 rank in world 0"


@pytest.mark.sweep
def test_one_lead_after_the_other_is_killed_and_the_numbers_are_those_of_a_run_left_alone(place):
    with ExitStack() as stack:
        (first, second, third), run = agents(stack, place, 3, every=5, TESTS_SECONDS_A_STEP="0.1")
        for attempt, process in enumerate((first, second), start=1):
            until(lambda: run.exists and len(steps_of(run)) > 8 * attempt, third)  # noqa: B023
            began = time.time()
            process.kill()
            seconds = until(lambda: of_attempt(run, attempt), third)[0]["time"] - began  # noqa: B023
            sys.stdout.write(f"{seconds:.2f} s from kill {attempt} to the end of the next step\n")
            assert seconds < allowed(PROMISE)
        until(lambda: steps_of(run)[-1]["step"] > 30, third)
        ask(run, "stop")
        assert third.wait(30) == 75
    with training(place, "alone", "--layout=dp1") as (process, alone):
        until(lambda: len(steps_of(alone)) > 30, process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert [(one["attempt"], one["layout"]) for one in events(run, "succession")] == [(1, "fsdp2"), (2, "dp1")]
    lines, _ = check(run)
    for one, other in zip(lines, steps_of(alone), strict=False):
        assert abs(one["loss"] - other["loss"]) <= 1e-12, (one, other)


@pytest.mark.sweep
def test_a_lead_that_was_halted_and_goes_on_later_ends_and_does_no_harm(place):
    with ExitStack() as stack:
        (first, second), run = agents(stack, place, 2, every=5, TESTS_SECONDS_A_STEP="0.1")
        until(lambda: run.exists and len(steps_of(run)) > 8, first)
        before = len(of_attempt(run, 0))
        first.send_signal(signal.SIGSTOP)
        until(lambda: len(of_attempt(run, 1)) > 3, second, 90)
        first.send_signal(signal.SIGCONT)
        said = first.communicate(timeout=20)[0]
        assert (first.returncode, "was taken for dead, and ends with its ranks" in said) == (3, True), said
        count = len(of_attempt(run, 1))
        until(lambda: len(of_attempt(run, 1)) > count + 3, second)
        ask(run, "stop")
        assert second.wait(30) == 75
    assert len(of_attempt(run, 0)) - before <= 1  # the step that was under way as it was halted
    assert [one["attempt"] for one in events(run, "deposed")] == [0]
    assert (run.agent().attempt, run.agent().exit) == (1, 75)
    check(run)


@pytest.mark.sweep
def test_a_notice_to_the_first_host_takes_it_out_with_code_0_and_no_step_is_done_again(place):
    with ExitStack() as stack:
        (first, second), run = agents(stack, place, 2, every=0, TESTS_SECONDS_A_STEP="0.1")
        until(lambda: run.exists and len(steps_of(run)) > 8, first)
        first.send_signal(signal.SIGTERM)
        said = first.communicate(timeout=40)[0]
        assert (first.returncode, "which the others go on with" in said) == (0, True), said
        until(lambda: len(of_attempt(run, 1)) > 3, second)
        second.send_signal(signal.SIGTERM)  # the only one that is left
        assert second.wait(30) == 75
    assert [one["reason"] for one in events(run, "lead_lost")] == ["its host leaves the run"]
    lines, again = check(run)
    assert (again, [line["step"] for line in steps_of(run)]) == (0, list(range(len(lines))))
    assert not events(run, "deposed")
    assert not events(run, "run_failed")


@pytest.mark.sweep
def test_a_notice_to_all_hosts_stops_the_run_saved_on_all(place):
    with ExitStack() as stack:
        both, run = agents(stack, place, 2, every=0, TESTS_SECONDS_A_STEP="0.1")
        until(lambda: run.exists and len(steps_of(run)) > 8, both[0])
        for process in reversed(both):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        assert [process.wait(40) for process in both] == [75, 75]
    assert not events(run, "succession")
