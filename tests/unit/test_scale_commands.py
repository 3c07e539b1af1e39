"""``scale``, ``drain`` and ``status`` of a run without an agent: what they show, and refuse before they ask."""

import json
import pickle
import sys

import pytest

import dynatrain
from dynatrain.app.commands import drain
from dynatrain.app.main import main
from dynatrain.app.mistake import MistakeError
from dynatrain.app.predicted import predict, seconds_of
from dynatrain.app.resize import layout_of_size
from dynatrain.app.resume import take_up
from dynatrain.app.runs import RunWorld, config_of
from dynatrain.config.load import load_config
from dynatrain.config.run import Switch
from dynatrain.config.toml import to_toml
from dynatrain.layout.form import LayoutError
from dynatrain.observe.asked import NotDoneError
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
        log.write("crossing", stage=stage, world=7, members=list(members), nodes=[0] * len(members), layout=layout)


def on_two_hosts(run):
    """Three ranks on two hosts; a third one has left."""
    with Log(run.events, generation=0, attempt=0) as log:
        for node, name in enumerate(("gpu-a.lan", "gpu-b.lan", "gpu-c.lan")):
            log.write("agent_started", world_size=3, nodes=3, node=node, host=name)
        log.write("crossing", stage="done", world=1, members=[0, 1, 3], nodes=[0, 1, 1], layout="fsdp3")
        log.write("host_left", node=2)


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
        (["drain", "one"], ["--rank R... or --host H..."]),
        (["drain", "one", "--host", "1"], ["--host 1: the run's hosts are not known: it has not begun"]),
        (["drain", "one", "--rank", "1", "--deadline", "soon"], ["--deadline: 'soon' is no duration", "90s"]),
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "gpu-x"], ["--host gpu-x", "0 (gpu-a.lan), 1 (gpu-b.lan)."]),
        (["--host", "gpu-c"], ["--host gpu-c: the run's hosts are 0 (gpu-a.lan), 1 (gpu-b.lan)."]),
        (["--host", "gpu-a"], ["Node 0 leads the run", "dynatrain stop", "--rank 0,"]),
        (["--host", "gpu-b", "--rank", "0"], ["one of both"]),
        (["--host", "gpu-b", "--layout", "dp2"], ["one is not running"]),  # with a newcomer on the other host
        (["--host", "gpu-b"], ["1 ranks", "world.min = 2"]),
    ],
)
def test_hosts_are_named_by_node_or_name_and_refused_with_those_that_there_are(run, call, words, said):
    on_two_hosts(run)
    code, _, err = call("drain", "one", *words)
    assert code == 2
    assert all(text in err for text in said), err


def test_spares_come_for_the_ranks_of_a_host_and_for_no_others(run):
    on_two_hosts(run)
    world, spared = RunWorld.of(run), checked("--world.spares=1")
    assert drain._layout(spared, world, [1, 2], "", whole=True) == "fsdp2"
    assert drain._layout(spared, world, [1], "", whole=False) == "fsdp2"
    with pytest.raises(LayoutError, match=r"world\.min = 2"):
        drain._layout(spared, world, [1, 2], "", whole=False)


def test_status_tells_the_hosts_and_their_ranks(run, call):
    on_two_hosts(run)
    out = call("status", "one")[1]
    assert "  node 0, gpu-a.lan: rank 0\n  node 1, gpu-b.lan: ranks 1, 2\n" in out
    assert json.loads(call("status", "one", "--json")[1])["hosts"] == {"0": "gpu-a.lan", "1": "gpu-b.lan"}
    with Log(run.events, generation=0, attempt=1) as log:  # the hosts of an earlier attempt are no longer the run's
        log.write("agent_started", world_size=1, nodes=1, node=0, host="gpu-d")
    assert json.loads(call("status", "one", "--json")[1])["hosts"] == {"0": "gpu-d"}


def switch(number, *, moved=0, move=0.0, old=4, new=4, outcome="committed", **seconds):
    phases = {"build": 1.0, "warm": 0.5, "quiesce": None, "check": 0.25, "compile": None, "commit": 0.25}
    return {
        "switch": number,
        "outcome": outcome,
        "world": {"old": old, "new": new},
        "bytes": {"moved": moved},
        "seconds": {**phases, "move": move, **seconds},
    }


def test_a_drain_is_predicted_from_what_earlier_switches_took():
    assert predict(1000, [switch(1, outcome="aborted")], [0.1]).seconds is None
    alone = [switch(1, moved=100, move=2.0), switch(2, outcome="aborted", moved=1, move=99.0)]
    assert predict(1000, alone, [1.0, 0.5, 9.0]).seconds == pytest.approx(2.0 + 1000 / 50 + 3 * 1.0)
    crossed = [*alone, switch(3, old=4, new=2, moved=100, move=1.0, build=3.0)]
    found = predict(1000, crossed, [])
    assert found.seconds == pytest.approx(4.0 + 1000 / 75)
    assert "1 kB at 75 B/s, 4 s for all else, as in switch 3 of this run" in found.text
    assert "unknown rate" in predict(1000, [switch(1)], []).text


def test_a_deadline_that_earlier_switches_say_cannot_be_kept_is_refused_and_the_nearest_named(run, call, monkeypatch):
    monkeypatch.setattr(drain, "certificates", lambda _: (switch(1, moved=10**6, move=100.0, old=2, new=3),))
    crossed(run)
    code, _, err = call("drain", "one", "--rank", "2", "--deadline", "10s")
    assert (code, "--deadline=10s cannot be kept" in err, "Nearest: --deadline=" in err) == (2, True, True), err
    code, out, err = call("drain", "one", "--rank", "2", "--deadline", "2h")
    assert (code, "1 of 3 ranks leave, fsdp3 -> fsdp2: about" in out, "not running" in err) == (2, True, True)


@pytest.mark.parametrize(("text", "value"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200)])
def test_durations_are_read_as_people_write_them(text, value):
    assert seconds_of(text, ValueError) == value


@pytest.mark.parametrize("text", ["", "s", "-3s", "0", "nan", "inf", "1e99h", "3 days"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="is no duration"):
        seconds_of(text, ValueError)


@pytest.mark.parametrize(
    ("words", "token", "said"),
    [
        (["one"], "", ["one takes in nobody", "join.json"]),
        (["10.0.0.7:29400", "--run", "one"], "", ["DYNATRAIN_TOKEN"]),
        (["10.0.0.7", "--run", "one"], "t", ["'10.0.0.7' is no HOST:PORT"]),
        (["two"], "", ["No run 'two'", "one"]),
    ],
)
@pytest.mark.usefixtures("run")
def test_a_join_that_does_not_say_where_and_with_what_is_refused(call, monkeypatch, words, token, said):
    monkeypatch.setenv("DYNATRAIN_TOKEN", token)
    code, _, err = call("join", *words)
    assert code == 2
    assert all(text in err for text in said), err


def test_status_knows_where_the_ranks_are_where_nodes_have_not_equally_many(run):
    with Log(run.events, generation=0, attempt=1) as log:
        for node, name in enumerate(("gpu-b", "gpu-c")):
            log.write("agent_started", world_size=3, nodes=2, seats=[0, 0, 1], node=node, host=name)
    world = RunWorld.of(run)
    assert (world.on([0]), world.on([1]), world.ranks_per_node) == ([0, 1], [2], 2)
    assert world.hosts == {0: "gpu-b", 1: "gpu-c"}


def test_a_run_that_is_taken_over_says_in_its_folder_what_its_ranks_go_on_with(tmp_path):
    config = checked("--layout=fsdp3").config
    switches = (Switch(step=5, layout="dp2"), Switch(step=9, layout="dp3"))
    config = config.model_copy(update={"switch": switches})
    run = RunFolder.create(tmp_path / "runs" / "two", config=to_toml(config), environment={})
    note = take_up(run, "tp2")
    assert "going on from step 0 (its beginning: nothing was saved), in tp2" in note
    assert "left out: of step 9" in note
    again = config_of(run)
    assert (again.layout, again.world.size, [one.step for one in again.switch]) == ("tp2", 2, [5])
    check_run(again)
