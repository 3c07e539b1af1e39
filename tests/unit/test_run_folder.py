import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli import environment

from dynatrain.observe.mark import LEASE_SECONDS, AgentMark, Lease, MarkError, silence
from dynatrain.observe.process import children_of, process_stat
from dynatrain.observe.run import RunError, RunFolder

pytestmark = pytest.mark.clock


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


def test_a_run_that_cannot_be_filled_leaves_nothing_whatever_ends_it(tmp_path: Path) -> None:
    def interrupted(draft: RunFolder) -> None:
        assert draft.exists
        assert not RunFolder(tmp_path / "new" / "one").exists
        assert RunFolder.all(tmp_path / "new") == (), "a draft is no run yet"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RunFolder.create(tmp_path / "new" / "one", config="", environment={}, fill=interrupted)
    with pytest.raises(UnicodeEncodeError):
        RunFolder.create(tmp_path / "new" / "one", config="\udcff", environment={})
    assert list(tmp_path.iterdir()) == []


def test_two_starts_of_one_name_leave_each_other_alone(tmp_path: Path) -> None:
    def meanwhile(draft: RunFolder) -> None:
        (draft.path / "mine").touch()
        with pytest.raises(RunError, match=r"just making the run .*one.*one-2"):
            make(tmp_path / "one")
        make(tmp_path / "one.two")  # another name

    run = RunFolder.create(tmp_path / "one", config="", environment={}, fill=meanwhile)
    assert (run.path / "mine").exists()
    assert {entry.name for entry in tmp_path.iterdir()} == {"one", "one.two"}


def test_a_place_that_is_taken_while_a_run_is_made_is_left_as_it_was(tmp_path: Path) -> None:
    def overtaken(_: RunFolder) -> None:
        (tmp_path / "one").mkdir()
        (tmp_path / "one" / "thesis.tex").touch()

    with pytest.raises(RunError, match=r"thesis\.tex"):
        RunFolder.create(tmp_path / "one", config="", environment={}, fill=overtaken)
    assert [path.name for path in tmp_path.rglob("*")] == ["one", "thesis.tex"]


def test_the_draft_of_a_killed_start_is_removed_by_the_next_and_no_other_folder_is(tmp_path: Path) -> None:
    killed = (
        "import os, pathlib, sys; from dynatrain.observe.run import RunFolder\n"
        "RunFolder.create(pathlib.Path(sys.argv[1]), config='', environment={}, fill=lambda _: os._exit(9))"
    )
    done = subprocess.run([sys.executable, "-c", killed, str(tmp_path / "one")], env=environment(), check=False)
    assert done.returncode == 9
    (draft,) = tmp_path.iterdir()
    kept = [".one.draft", ".one.two.12345678.dynatrain", "one.dynatrain", ".ones.12345678.dynatrain"]
    for name in kept:
        (tmp_path / name).mkdir()
    make(tmp_path / "one")
    assert not draft.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"one", *kept}


def elsewhere(run: RunFolder, *, seconds_ago: float) -> AgentMark:
    """A run that an agent on another host has claimed, and its mark."""
    mark = replace(AgentMark.mine(3), host="another", pid=7)
    mark.write(run.path)
    (run.path / "agent.lease").touch()
    for name in ("agent.json", "agent.lease"):
        os.utime(run.path / name, (time.time() - seconds_ago,) * 2)
    return mark


def test_an_agent_on_another_host_binds_as_long_as_it_gives_signs_of_life(tmp_path: Path) -> None:
    run = make(tmp_path / "one")
    elsewhere(run, seconds_ago=LEASE_SECONDS - 10)
    assert run.liveness() == "elsewhere"
    with pytest.raises(RunError, match=r"process 7 on another.*50 s old.*60 s of silence.*--take-over"):
        run.claim()
    elsewhere(run, seconds_ago=LEASE_SECONDS + 1)
    assert run.liveness() == "gone"
    (run.path / "agent.lease").touch()
    assert run.liveness() == "elsewhere"
    assert run.claim(take_over=True).attempt == 4


def test_an_agent_gives_signs_of_life_and_learns_that_it_was_followed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("dynatrain.observe.mark.TOUCH_SECONDS", 0.01)
    run = make(tmp_path / "one")
    mark = run.claim()
    lease = Lease(run.path, mark)
    try:
        os.utime(run.path / "agent.json", (0, 0))
        until((run.path / "agent.lease").exists)
        assert mark.liveness(silence(run.path)) == "alive"
        assert silence(run.path) < LEASE_SECONDS
        assert lease.lost == ""
        elsewhere(run, seconds_ago=0)
        until(lambda: lease.lost)
        assert lease.lost == "process 7 on another has taken the run over"
    finally:
        lease.close()
    run.release(mark, 3)
    assert run.agent().host == "another", "who has lost a run says nothing of its end"


def until(holds) -> None:
    end = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "7", "[" * 100_000, "\udcff", '{"pid": 1, "started": 1, "boot": "", "host": 7, "attempt": 0}'],
)
def test_a_damaged_mark_is_told_with_its_path(tmp_path: Path, text) -> None:
    run = make(tmp_path / "one")
    (run.path / "agent.json").write_bytes(text.encode(errors="surrogateescape"))
    for ask in (run.agent, run.liveness, run.claim):
        with pytest.raises(MarkError, match=r"one/agent\.json.*remove the file"):
            ask()
