import os
import re
import threading
from pathlib import Path

import pytest

from dynatrain.observe import log as module
from dynatrain.observe.log import KINDS, Log, Tail

pytestmark = pytest.mark.clock

LINE = '{{"time": 1.0, "kind": "load", "step": {}}}\n'


def test_a_line_has_time_kind_generation_attempt_and_its_fields(tmp_path: Path) -> None:
    with Log(tmp_path / "events.jsonl", generation=2, attempt=1) as log:
        log.write("run_failed", reason="x\ny")
    (record,) = Tail(tmp_path / "events.jsonl").new()
    assert record.pop("time") > 0
    assert record == {"kind": "run_failed", "generation": 2, "attempt": 1, "reason": "x\ny"}


def test_a_tail_gives_each_record_once_and_leaves_an_unfinished_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.new() == []
    whole = LINE.format(1) + LINE.format(2)
    path.write_text(whole[:-10])
    assert [record["step"] for record in tail.new()] == [1]
    assert tail.new() == []
    with path.open("a") as file:
        file.write(whole[-10:])
    assert [record["step"] for record in tail.new()] == [2]
    assert tail.torn == 0


def test_a_line_torn_by_its_writers_death_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(LINE.format(1) + LINE.format(2)[:-10])
    with Log(path, generation=0, attempt=1) as log:
        log.write("load", step=2)
    tail = Tail(path)
    assert [record["step"] for record in tail.new()] == [1, 2]
    assert tail.torn == 1


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def write(rank: int) -> None:
        with Log(path, generation=0, attempt=0) as log:
            for step in range(200):
                log.write("load", rank=rank, step=step, filling="x" * 300)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tail = Tail(path)
    seen = [(record["rank"], record["step"]) for record in tail.new()]
    assert (sorted(seen), tail.torn) == ([(r, s) for r in range(4) for s in range(200)], 0)
    assert path.stat().st_size > 200 * 4 * 300


def test_the_table_of_kinds_is_complete_and_others_are_refused(tmp_path: Path) -> None:
    table = set(re.findall(r"^``(\w+)``", module.__doc__, re.MULTILINE)) | {"step", "validation", "loop"}
    assert table == KINDS
    with Log(tmp_path / "x", generation=0, attempt=0) as log, pytest.raises(LookupError, match="table"):
        log.write("nonsense")


DAMAGED = [
    "",
    "7",
    "{}",
    '{"a": 1}',
    '{"kind": "load"}',
    '{"time": "then", "kind": "load"}',
    '{"time": 1, "kind": []}',
    '{"time": 1, "kind": "step", "step": 3}',
    '{"time": 1, "kind": "validation", "step": 3, "loss": null, "samples": 4}',
    "[" * 100_000,
    "\udcff",
]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_line_that_readers_could_not_use_counts_as_torn(tmp_path: Path, line) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(f"{line}\n{LINE.format(2)}".encode(errors="surrogateescape"))
    tail = Tail(path)
    assert [record["step"] for record in tail.new()] == [2]
    assert tail.torn == 1


def test_lines_that_the_disk_does_not_take_are_counted_and_told_and_the_next_is_whole(
    tmp_path: Path, caplog, monkeypatch
) -> None:
    path, room = tmp_path / "events.jsonl", [0, 20, 10**6]
    write = os.write

    def full(handle: int, data: bytes) -> int:
        left = room.pop(0)
        if not left:
            raise OSError(28, "No space left on device")
        return write(handle, data[:left])

    with Log(path, generation=0, attempt=0) as log:
        log.write("load", step=1)
        assert caplog.text == ""
        monkeypatch.setattr(module.os, "write", full)
        for step in (2, 3, 4):
            log.write("load", step=step)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "events.jsonl is not written: [Errno 28] No space left on device (load); the run goes on" in said[0]
    assert "is written again; 2 lines are missing" in said[1]
    tail = Tail(path)
    assert ([record["step"] for record in tail.new()], tail.torn) == ([1, 4], 1)
