"""``scale``, ``drain`` and ``status`` of a run without an agent: what they show, and refuse before they ask."""

import json
import pickle
import sys

import pytest

import dynatrain
from dynatrain.app.handle import NotDoneError
from dynatrain.app.main import main
from dynatrain.app.mistake import MistakeError
from dynatrain.app.resize import layout_of_size
from dynatrain.config.load import load_config
from dynatrain.config.toml import to_toml
from dynatrain.layout.form import LayoutError
from dynatrain.observe.log import Log
from dynatrain.observe.requests import Answer
from dynatrain.observe.run import RunFolder
from dynatrain.space.run_check import check_run

FLAGS = ["--layout=fsdp2", "--world.min=2", "--world.max=6"]


def checked(*flags):
    return check_run(load_config(None, [*FLAGS, *flags]).config)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run in fsdp2 that may have 2 to 6 ranks."""
    monkeypatch.chdir(tmp_path)
    return RunFolder.create(tmp_path / "runs" / "one", config=to_toml(checked().config), environment={})


@pytest.fixture
def call(monkeypatch, capsys):
    """``(code, out, err)`` of a command."""

    def called(*words):
        monkeypatch.setattr(sys, "argv", ["dynatrain", *words])
        code = main()
        said = capsys.readouterr()
        return code, said.out, said.err

    return called


def crossed(run, *, stage="done", members=(1, 4, 5), layout="fsdp3"):
    with Log(run.events, generation=0, attempt=0) as log:
        log.write("agent_started", world_size=2, nodes=1)
        log.write("crossing", stage=stage, world=7, members=list(members), layout=layout)


def test_a_dry_run_shows_the_layout_and_what_it_moves_and_asks_for_nothing(run, call):
    code, out, _ = call("scale", "one", "4", "--dry-run")
    assert code == 0
    assert "fsdp2 -> fsdp4  (2 -> 4 ranks, mode keep)" in out
    assert "ranks that come: 2, 3" in out
    assert "Nothing was asked of the run." in out
    code, out, _ = call("scale", "one", "4", "--layout", "tp4", "--dry-run", "--json")
    found = json.loads(out)
    assert (code, found["to"], found["world"]) == (0, "tp4", {"old": 2, "new": 4})
    assert found["bytes"]["moved"] > 0
    assert not any(run.requests.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["scale", "one", "7"], ["7 ranks", "world.max = 6", "nearest: 6"]),
        (["scale", "one", "1"], ["1 ranks", "world.min = 2", "nearest: 2"]),
        (["scale", "one", "7", "--layout", "dp7"], ["world.max = 6", "nearest: 6"]),
        (["scale", "one", "4", "--layout", "dp2"], ["dp2", "2 ranks", "4", "nearest legal"]),
        (["scale", "one", "4", "--layout", "fdsp4"], ["fdsp4", "fsdp4"]),
        (["drain", "one", "--rank", "0"], ["world.min = 2", "nearest: 2"]),
        (["drain", "one", "--rank", "0", "2"], ["--rank 2", "0 .. 1"]),
        (["drain", "one", "--rank", "0", "1"], ["at least one stays", "dynatrain stop"]),
        (["scale", "one", "4"], ["one is not running"]),
        (["lend", "one"], ["Which ranks?", "one of both"]),
        (["lend", "one", "--rank", "1", "--count", "1"], ["one of both"]),
        (["lend", "one", "--rank", "1", "2"], ["no ranks 2", "0 .. 1"]),
        (["lend", "one", "--count", "2"], ["2 of 2 ranks cannot be lent; nearest: 1 to 1"]),
        (["lend", "one", "--rank", "0"], ["world.min = 2", "nearest: 2"]),
        (["reclaim", "one"], ["one is not running"]),
        (["park", "one"], ["one is not running"]),
        (["unpark", "one"], ["one is not running"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule_and_the_nearest_before_anybody_is_asked(run, call, words, said):
    code, _, err = call(*words)
    assert code == 2
    assert all(text in err for text in said), err
    assert not any(run.requests.iterdir())


def test_settings_of_the_world_that_contradict_each_other_are_refused():
    for flags, said in (
        (["--world.max=1"], "world.min"),
        (["--world.sizes=[3, 8]"], "world.sizes has 8"),
        (["--world.step=4"], "world.size: 2 ranks are not allowed: world.step = 4"),
    ):
        with pytest.raises(ValueError, match="cannot start") as caught:
            checked(*flags)
        assert said in str(caught.value)


def test_status_tells_what_is_lent_and_whether_the_state_is_parked(run, call):
    assert json.loads(call("status", "one", "--json")[1]) | {"lent": "", "parked": None} == json.loads(
        call("status", "one", "--json")[1]
    )
    with Log(run.events, generation=0, attempt=0) as log:
        log.write("lent", id="a", places="node 0 slot 1")
        log.write("parking", step=7, switch=3, parked=True)
    told = "2 ranks in world 0; lent: node 0 slot 1; parked in host memory before step 7\n"
    assert told in call("status", "one")[1]
    with Log(run.events, generation=0, attempt=0) as log:
        log.write("lent", id="b", places="")
        log.write("parking", step=7, switch=4, parked=False)
    assert "2 ranks in world 0\n" in call("status", "one")[1]


@pytest.mark.usefixtures("run")
def test_a_handle_says_what_did_not_happen_and_returns_what_did(monkeypatch):
    asked = []

    def answers(folder, verb, arguments, timeout):
        asked.append((folder.path, verb, arguments, timeout))
        return "id", Answer(outcome="aborted" if verb == "unpark" else "done", message="why")

    monkeypatch.setattr("dynatrain.app.handle.ask", answers)
    handle = dynatrain.RunHandle("one", timeout=5)
    assert handle.lend(count=1).message == "why"
    assert handle.lend(ranks=(1,), layout="dp1").outcome == "done"
    assert handle.reclaim(mode="tight").outcome == "done"
    assert [one[1:] for one in asked] == [
        ("lend", {"size": 1}, 5),
        ("lend", {"leave": [1], "layout": "dp1"}, 5),
        ("reclaim", {"mode": "tight"}, 5),
    ]
    with pytest.raises(NotDoneError, match="unpark: aborted, why") as caught:
        handle.unpark()
    assert caught.value.answer.outcome == "aborted"
    assert str(pickle.loads(pickle.dumps(caught.value))) == "unpark: aborted, why"  # noqa: S301 - as an actor sends it
    with pytest.raises(MistakeError, match="nearest: 1 to 1"):
        handle.lend(count=2)


def test_the_layout_of_another_size_follows_from_the_present_one():
    run = checked()
    assert layout_of_size(run, "fsdp2.tp2", 6, "") == "fsdp3.tp2"
    assert layout_of_size(run, "fsdp2.tp2", 2, "--tensor-model-parallel-size 2 --world-size 2") == "tp2"
    with pytest.raises(LayoutError, match="tp3"):
        layout_of_size(run, "fsdp2", 3, "tp3")


def test_status_tells_the_world_and_its_members(run, call):
    assert "2 ranks in world 0\n" in call("status", "one")[1]
    crossed(run, stage="undone")
    assert "2 ranks in world 0\n" in call("status", "one")[1]
    crossed(run)
    assert "3 ranks in world 7: members 1, 4, 5\n" in call("status", "one")[1]
    assert json.loads(call("status", "one", "--json")[1])["world"] == {"generation": 7, "size": 3, "members": [1, 4, 5]}
    code, out, _ = call("switch", "one", "tp3", "--dry-run")
    assert (code, "tp3 does not divide" in out) == (2, False)
    assert "fsdp3 -> dp3  (3 -> 3 ranks" in call("switch", "one", "dp3", "--dry-run")[1]
    with Log(run.events, generation=0, attempt=1) as log:
        log.write("agent_started", world_size=4, nodes=1)
    assert "4 ranks in world 0\n" in call("status", "one")[1]
