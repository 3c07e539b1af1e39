import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dynatrain.observe.process import children_of, process_stat
from dynatrain.observe.run import RunError, RunFolder


def make(path: Path) -> RunFolder:
    return RunFolder.create(path, config="a = 1\n", environment={"torch": "2.13"})


def test_a_new_run_has_its_folders_and_no_draft_beside_it(tmp_path: Path) -> None:
    run = make(tmp_path / "runs" / "one")
    assert {entry.name for entry in run.path.iterdir()} == {
        "config.toml",
        "environment.json",
        "logs",
        "requests",
        "switches",
    }
    assert json.loads(run.environment.read_text()) == {"torch": "2.13"}
    assert [entry.name for entry in run.path.parent.iterdir()] == ["one"]
    assert (run.log(3).name, run.switch(7).name) == ("rank_3.log", "007")


def test_a_taken_place_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    make(tmp_path / "one")
    with pytest.raises(RunError, match="already holds a run"):
        make(tmp_path / "one")
    foreign = tmp_path / "home"
    foreign.mkdir()
    (foreign / "thesis.tex").touch()
    with pytest.raises(RunError, match=r"thesis\.tex.*Nearest free place"):
        make(foreign)
    assert [entry.name for entry in foreign.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("place", ["file/run", "/proc/nowhere/run", "file"])
def test_an_unwritable_place_is_refused_with_a_place_that_would_do(tmp_path: Path, place) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot be written.*for example"):
        make(tmp_path / place)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_run_is_found_by_path_or_name_and_a_wrong_name_names_the_nearest(tmp_path: Path) -> None:
    run = make(tmp_path / "alpha")
    make(tmp_path / "beta")
    (tmp_path / "no-run").mkdir()
    assert RunFolder.find("alpha", tmp_path) == RunFolder.find(str(run.path)) == RunFolder.open(run.path) == run
    with pytest.raises(RunError, match="Nearest: alpha"):
        RunFolder.find("alfa", tmp_path)
    with pytest.raises(RunError, match="not a run folder"):
        RunFolder.open(tmp_path / "no-run")
    with pytest.raises(RunError, match="no runs there"):
        RunFolder.find("alpha", tmp_path / "elsewhere")


def test_the_newest_run_is_the_one_started_last(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="No runs under"):
        RunFolder.newest(tmp_path)
    old, new = make(tmp_path / "z"), make(tmp_path / "a")
    os.utime(old.environment, ns=(1, 1))
    assert RunFolder.newest(tmp_path) == new
    old.claim()
    assert RunFolder.newest(tmp_path) == old


def test_a_living_agent_keeps_others_out_and_its_end_is_told(tmp_path: Path) -> None:
    run = make(tmp_path / "one")
    assert run.agent() is None
    mark = run.claim()
    assert mark.liveness() == "alive"
    with pytest.raises(RunError, match=f"driven by process {os.getpid()}"):
        run.claim()
    run.release(mark, 3)
    assert (run.agent().exit, run.agent().liveness()) == (3, "ended")
    assert run.claim().attempt == 1


def test_a_later_process_with_the_same_number_is_not_taken_for_the_agent(tmp_path: Path) -> None:
    mark = make(tmp_path / "one").claim()
    assert replace(mark, started=mark.started + 1).liveness() == "gone"
    assert replace(mark, boot="another").liveness() == "gone"
    assert replace(mark, host="another").liveness() == "elsewhere"


def test_an_ended_process_that_nobody_collected_is_gone(tmp_path: Path) -> None:
    mark = make(tmp_path / "one").claim()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in children_of(os.getpid())
        theirs = replace(mark, pid=child.pid, started=process_stat(child.pid).started)
        assert theirs.liveness() == "alive"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert theirs.liveness() == "gone"
    assert process_stat(child.pid) is None
