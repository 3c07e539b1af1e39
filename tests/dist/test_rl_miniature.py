"""The recipe of reinforcement learning: it learns, on ranks that come and go, from an engine in the places of some."""

import runpy
import time

import psutil
import pytest
from tests.cli import ROOT, dynatrain, environment

from dynatrain.app.runs import certificates
from dynatrain.observe.log import Tail


def events(run, kind):
    return [line for line in Tail(run.events).new() if line["kind"] == kind]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("rounds", "accuracy"), [(3, 0.15), pytest.param(6, 0.6, marks=pytest.mark.sweep)], ids=["short", "whole"]
)
def test_a_tiny_policy_learns_while_its_ranks_are_lent_to_the_engine_and_taken_back(
    tmp_path, monkeypatch, rounds, accuracy
):
    for name, value in (environment() | {"ENGINE": ""}).items():
        monkeypatch.setenv(name, value)
    recipe = runpy.run_path(str(ROOT / "recipes" / "rl_miniature.py"))
    updates, began = recipe["UPDATES"], time.time()

    code, seen, run = recipe["main"](tmp_path, rounds=rounds)

    assert (code, len(seen)) == (0, rounds), (tmp_path / "run.agent.log").read_text()
    assert seen[0][0] < 0.12
    assert seen[-1][0] > accuracy
    assert all(apart < 1e-5 and layout == "fsdp2" for _, apart, layout in seen)
    # Ranks and layouts changed at the very steps, and each place went to the engine only when nobody had it any more.
    switches = certificates(run)
    there = [("lend", "fsdp2.tp2", "fsdp2", 4, 2), ("reclaim", "fsdp2", "fsdp2.tp2", 2, 4)] * rounds
    assert [
        (one["cause"]["verb"], one["from"], one["to"], one["world"]["old"], one["world"]["new"]) for one in switches
    ] == there[:-1]
    steps = [step + ahead for step in range(updates, updates * rounds + 1, updates) for ahead in (0, 3)][:-1]
    assert [one["step"] + 1 for one in switches] == steps
    assert all(one["outcome"] == "committed" and one["digest"]["equal"] for one in switches)
    worlds = [line for line in events(run, "crossing") if line["stage"] == "done"]
    assert [len(line["members"]) for line in worlds] == [2, 4] * (rounds - 1) + [2]
    assert [member for line in worlds for member in line["newcomers"]] == [*range(4, 2 * rounds + 2)]
    ended = {line["member"]: line for line in events(run, "rank_ended")}
    asked = [line["time"] for line in Tail(run.metrics).new()]  # behind the engine's answer
    leavers = [line["leavers"] for line in worlds if line["leavers"]]
    assert len(leavers) == rounds
    for pair, then in zip(leavers, asked, strict=True):
        assert all(ended[member]["time"] < then and ended[member]["code"] == 0 for member in pair)
    assert dynatrain("check", str(run.path), cwd=tmp_path).code == 0
    # Nothing is left behind.
    assert not [one for one in psutil.Process().children(recursive=True) if one.create_time() > began]
    assert all(not psutil.pid_exists(pid) for line in events(run, "ranks_started") for pid in line["pids"])
