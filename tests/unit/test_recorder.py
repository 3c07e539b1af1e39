"""What rank 0 writes of a switch, without any rank."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from dynatrain.app.switches import switch_lines
from dynatrain.cluster.board import Board
from dynatrain.judge.certificate import check_certificate
from dynatrain.layout.text import parse_layout
from dynatrain.observe.run import RunFolder
from dynatrain.train.order import Order
from dynatrain.train.record import SETTLED, Recorder
from dynatrain.train.saver import Saved


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run", config="", environment={})


def recorder_of(folder):
    return Recorder(folder, Board(HashStore(), 1), rank=0, generation=0, attempt=0, rates=None)


def attempt_of(number=1, mode="auto"):
    """An attempt that never got a plan."""
    return SimpleNamespace(
        order=Order(number=number, layout="dp1", mode=mode, by="cli"),
        way=SimpleNamespace(crossing=None),
        blueprint=None,
        report=None,
        seconds={"build": 0.5},
        carried_by="gloo",
        party=SimpleNamespace(device=torch.device("cpu"), world_size=1),
        old=SimpleNamespace(layout=parse_layout("dp1")),
        mended=0,
        target=parse_layout("dp1"),
    )


def test_a_switch_whose_books_cannot_be_written_does_not_end_the_run(folder, caplog):
    folder.switches.rmdir()
    folder.switches.write_text("a file where the folder should be")
    recorder = recorder_of(folder)
    recorder.ended(attempt_of(), "committed", "", 5, {})
    for step in range(SETTLED):
        recorder.step_ended(float(step))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all("certificate.json of switch 1 is not written" in text for text in said)
    assert json.loads(folder.events.read_text())["phase"] == "committed"


def test_a_full_disk_does_not_end_the_run(folder, caplog):
    folder.events.symlink_to("/dev/full")
    recorder = recorder_of(folder)
    recorder.announced(attempt_of().order, 5)
    recorder.loaded(5, "step_00000005", parse_layout("dp1"))
    recorder.saved(Saved(step=6, outcome="done", message="saved", order=None))
    recorder.ended(attempt_of(), "aborted", "why", 5, {})
    assert caplog.text.count("No space left on device (switch); the run goes on") == 1
    assert (folder.switch(1) / "certificate.json").exists()


@pytest.mark.parametrize("mode", ["keep", "tight", "auto"])
def test_a_switch_that_never_got_a_plan_is_recorded_in_the_mode_asked_for(folder, mode):
    recorder_of(folder).ended(attempt_of(mode=mode), "aborted", "build failed", 5, {})
    record = json.loads((folder.switch(1) / "certificate.json").read_text())
    assert record["mode"] == mode
    assert check_certificate(record) == ()


def test_lost_seconds_are_what_the_first_steps_took_beyond_three_usual_ones(folder):
    recorder = recorder_of(folder)
    for step in range(1000):
        recorder.step_ended(float(step))
    recorder.ended(attempt_of(), "committed", "", 1000, {})
    for end in (1003.0, 1004.5, 1005.5, *(1006.5 + i for i in range(SETTLED - 3))):
        recorder.step_ended(end)
    record = json.loads((folder.switch(1) / "certificate.json").read_text())
    assert record["lost_seconds"] == pytest.approx(1005.5 - 999 - 3)


def test_what_is_kept_of_the_steps_does_not_grow(folder):
    recorder = recorder_of(folder)
    for number in range(1, 4):
        for step in range(1000):
            recorder.step_ended(float(step))
        assert len(recorder._ends) <= SETTLED
        recorder.ended(attempt_of(number), "committed", "", 1000, {})


@pytest.mark.parametrize("step", [0, 1, 5])
def test_a_certificate_tells_the_steps_before_it_also_where_there_were_none(folder, step):
    recorder_of(folder).ended(attempt_of(), "aborted", "planted", step, {})
    record = json.loads((folder.switch(1) / "certificate.json").read_text())
    assert check_certificate(record) == ()
    assert record["step"] == step - 1
    assert f"aborted after {step} steps" in next(switch_lines(record))
