"""The demo, as a newcomer runs it: real ranks, real text, eight switches."""

import pytest
from tests.cli import dynatrain


@pytest.mark.timeout(150)
def test_the_demo_learns_across_eight_certified_switches_in_less_than_120_s(tmp_path):
    said = dynatrain("demo", "--json", cwd=tmp_path, timeout=120)
    assert said.code == 0, said.err
    record = said.record
    assert record["steps"] == 108
    assert record["last_loss"] < record["first_loss"] - 1.5
    assert record["validation_loss"] < record["first_loss"] - 1.5
    status = dynatrain("status", record["run"], cwd=tmp_path).out
    assert f"validation after 108 steps: loss {record['validation_loss']:#.6g}" in status
    switches = record["switches"]
    assert [one["outcome"] for one in switches] == ["committed"] * 8
    assert all(one["digest"]["equal"] for one in switches)
    assert all(one["lost_seconds"] is not None for one in switches)
    checked = dynatrain("check", record["run"], "--json", cwd=tmp_path)
    assert checked.code == 0
    assert len(checked.record["checked"]) == 8
