"""The demo, as a newcomer runs it: real ranks, real text, eight switches."""

from pathlib import Path

import pytest
from tests.cli import dynatrain, switch_rows

from dynatrain.config.load import load_config
from dynatrain.data.order import batch_ids
from dynatrain.data.prepare import open_samples
from dynatrain.observe.log import Tail
from dynatrain.observe.run import RunFolder


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
    looked_at = [one["what"] for one in checked.record["checked"]]
    assert looked_at[:8] == [f"{number:03d}" for number in range(1, 9)]
    assert [Path(what).name for what in looked_at[8:]] == ["step_00000108"], "and the checkpoint of its end"
    run = RunFolder(Path(record["run"]))
    every_sample_once_in_the_order_of_the_seed(run)
    rows = switch_rows(dynatrain("history", str(run.path), cwd=tmp_path).out)
    assert [row[1] for row in rows] == [f"{one['from']} -> {one['to']}" for one in switches]
    for row, one in zip(rows, switches, strict=True):
        assert (row[3], row[-1], "-" in row) == ("committed", "yes", False)
        assert (row[4] == "0 B", row[6] == "0 B") == (one["bytes"]["moved"] == 0, one["bytes"]["adopted"] == 0)


def every_sample_once_in_the_order_of_the_seed(run: RunFolder) -> None:
    """What the ranks say they trained on is what a run that never switched would have."""
    config = load_config(run.config, []).config
    samples = open_samples(run.path, config.data.sequence)
    recorded = [line["samples"] for line in Tail(run.metrics).new() if line["kind"] == "step"]
    assert recorded == [
        batch_ids(config.seed, step, config.batch.global_sequences, len(samples)).tolist()
        for step in range(config.steps)
    ]
    seen = [sample for batch in recorded for sample in batch]
    assert len(set(seen)) == len(seen) <= len(samples)
