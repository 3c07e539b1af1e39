import re
import threading
from pathlib import Path

import pytest

from dynatrain.observe import log as module
from dynatrain.observe.log import KINDS, Log, Tail


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
    path.write_text('{"step": 1}\n{"st')
    assert tail.new() == [{"step": 1}]
    assert tail.new() == []
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert tail.new() == [{"step": 2}]
    assert tail.torn == 0


def test_a_line_torn_by_its_writers_death_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"step": 1}\n{"st')
    with Log(path, generation=0, attempt=1) as log:
        log.write("step", step=2)
    tail = Tail(path)
    assert [record["step"] for record in tail.new()] == [1, 2]
    assert tail.torn == 1


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def write(rank: int) -> None:
        with Log(path, generation=0, attempt=0) as log:
            for step in range(200):
                log.write("step", rank=rank, step=step, filling="x" * 300)

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
    table = set(re.findall(r"^``(\w+)``", module.__doc__, re.MULTILINE)) | {"step", "validation"}
    assert table == KINDS
    with Log(tmp_path / "x", generation=0, attempt=0) as log, pytest.raises(LookupError, match="table"):
        log.write("nonsense")
