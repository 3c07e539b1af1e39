"""Loops of the user's own as runs of the agent: real agent, real ranks, real commands."""

import time

import pytest
from tests.cli import dynatrain

import dynatrain as library
from dynatrain.app.mistake import MistakeError
from dynatrain.app.runs import RunWorld
from dynatrain.observe.log import Tail
from dynatrain.observe.run import RunFolder

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(200)]

LOOP = """
import time

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


class History:
    def __init__(self):
        self.steps = []

    def state_dict(self):
        return {"steps": list(self.steps)}

    def load_state_dict(self, state):
        self.steps = list(state["steps"])


def build(mesh, layout):
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh["dp", "fsdp"])
    return model, torch.optim.AdamW(model.parameters())


def learn(run):
    torch.manual_seed(0)
    history = History()
    sw = run.switcher(build, state={"history": history}, data_parallel="free")
    for step in sw.steps(until=run.steps):
        assert history.steps == list(range(step))  # on every rank, also of those that came, and of a run that goes on
        history.steps.append(step)
        (sw.model(torch.ones(2, 8)) ** 2).mean().backward()
        sw.optimizer.step()
        sw.optimizer.zero_grad()
        run.note(known=len(history.steps))
        time.sleep(0.0 if run.steps < 100 else 0.02)


def idle(run):
    pass
"""
CONFIG = """
loop = "{loop}"
layout = "dp1"
steps = {steps}
device = "cpu"
"""


@pytest.fixture
def configure(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)

    def write(name="learn", steps=4):
        (tmp_path / "run.toml").write_text(CONFIG.format(loop=f"loop.py:{name}", steps=steps))
        return tmp_path

    return write


def lines(run):
    return Tail(run.metrics).new()


def test_it_is_saved_and_goes_on_where_it_was_with_what_it_has_registered(configure):
    place = configure()
    first = dynatrain("train", "run.toml", "--run", "own", cwd=place)
    again = dynatrain("train", "--run", "own", "--steps=7", cwd=place)

    assert (first.code, again.code) == (0, 0), (first, again)
    told = [(line["step"], line["known"]) for line in lines(RunFolder(place / "runs" / "own"))]
    assert told == [(step, step + 1) for step in range(7)]


def test_it_answers_the_requests_that_any_run_answers(configure, monkeypatch):
    place = configure(steps=100000)
    monkeypatch.chdir(place)  # the loop's file is named from there
    run = library.RunAgent(place / "run.toml", run=place / "own")
    run.start()
    try:
        while len(lines(run.folder)) < 3:
            time.sleep(0.05)
        answers = [run.scale(2, layout="fsdp2"), run.switch("dp2"), run.lend(count=1), run.reclaim(), run.park()]
        answers += [run.unpark(), run.save()]
        assert RunWorld.of(run.folder).size == 2
        stopped = run.stop()
        code = run.wait(60)
    finally:
        run.end()

    assert [answer.outcome for answer in answers] == ["done"] * 7
    assert "saved in" in stopped.message
    assert code == 75
    assert [line["known"] for line in lines(run.folder)] == list(range(1, len(lines(run.folder)) + 1))
    assert dynatrain("check", "own", cwd=place).code == 0
    assert "2 ranks" in dynatrain("status", str(place / "own"), cwd=place).out


def test_what_trains_nothing_or_cannot_be_forked_ends_with_a_word_about_the_file(configure):
    place = configure("idle")
    ended = dynatrain("train", "run.toml", "--run", "idle", cwd=place)
    (place / "loop.py").write_text(
        f"import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n{LOOP}"
    )
    threads = dynatrain("train", "run.toml", "--run", "threads", cwd=place)

    assert ended.code == threads.code == 3, (ended, threads)
    assert "loop.py:idle has ended without run.switcher(build): nothing was trained" in ended.err + ended.out
    assert f"Importing {place}/loop.py:idle starts 1 thread(s)" in threads.err + threads.out


def test_a_loop_that_is_not_there_is_refused(configure):
    place = configure()
    (place / "loop.py").unlink()
    ended = dynatrain("train", "run.toml", "--run", "own", cwd=place)
    assert (ended.code, (place / "runs").exists()) == (2, False)
    with pytest.raises(MistakeError, match=r"there is no file .*loop.py; FILE.py:FUNCTION"):
        library.RunAgent(place / "run.toml", run=place / "own").start()
