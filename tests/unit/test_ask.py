"""Asking a run for something: whoever asks learns it when nobody is left to answer."""

import itertools
import time

import pytest

from dynatrain.app import ask as asking
from dynatrain.app.ask import ask
from dynatrain.observe.requests import Answer, Inbox
from dynatrain.observe.run import RunFolder


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose agent is as the test says, look by look; the last word stays."""
    monkeypatch.setattr(asking, "_LOOK_SECONDS", 0.01)
    found = RunFolder.create(tmp_path / "one", config="", environment={})

    def be(*states):
        looks = itertools.chain(states, itertools.repeat(states[-1]))
        monkeypatch.setattr(RunFolder, "liveness", lambda _run: next(looks))
        return found

    return be


def asked(run, timeout=20.0):
    began = time.monotonic()
    _, answer = ask(run, "save", {}, timeout)
    return answer, time.monotonic() - began


def test_an_agent_that_ends_or_is_killed_meanwhile_is_not_waited_for(run, monkeypatch):
    answer, seconds = asked(run("alive", "alive", "ended"))
    assert (answer.outcome, seconds < 5) == ("failed", True)
    assert answer.message == "the run has ended; see dynatrain status one"
    monkeypatch.setattr(asking, "_FOLLOWED_SECONDS", 0.1)
    answer, seconds = asked(run("alive", "gone"))
    assert (answer.outcome, 0.1 < seconds < 5) == ("failed", True)
    assert answer.message == "the run is not running any more, its agent was killed; see dynatrain status one"


def test_an_agent_that_is_followed_in_time_answers(run, monkeypatch):
    monkeypatch.setattr(asking, "_FOLLOWED_SECONDS", 30.0)
    folder = run("alive", *["gone"] * 5, "alive")
    answer, seconds = asked(folder, timeout=1.0)
    assert answer.message == "no answer within 1 s; see dynatrain events one"
    assert seconds >= 1.0


def test_what_was_answered_just_before_the_end_counts(run, monkeypatch):
    folder = run("alive", "ended")

    def late(requests, request_id, timeout):
        if timeout:  # the answer comes between the look for it and the one at the agent
            return None
        Inbox(requests).answer(request_id, Answer(outcome="done", message="step_00000004"))
        return Answer(outcome="done", message="step_00000004")

    monkeypatch.setattr(asking, "wait_answer", late)
    assert asked(folder)[0].outcome == "done"
