"""The tables and plots of ``make bench``, out of runs that were saved."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli import ROOT

SCRIPT = ROOT / "benchmarks" / "matrix.py"
SAVED = ROOT / "tests" / "fixtures" / "matrix"


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(SAVED, tmp_path / "matrix"))


@pytest.fixture(scope="module")
def matrix():
    return runpy.run_path(str(SCRIPT))


def test_every_row_of_the_runs_is_in_the_tables_and_every_command_with_its_link_speeds(matrix):
    found = matrix["saved"](SAVED)
    page = "\n".join(matrix["tables"](found))
    records = [record for records in found.values() for record in records]
    rows = [row for record in records for row in record["rows"]]
    assert len(rows) == sum(len(json.loads(path.read_text())["rows"]) for path in SAVED.glob("*.json"))
    assert page.count("| `") == sum(row["seconds"] is not None for row in rows)
    for row in rows:
        line = (
            f"| `{row['case']}` | {matrix['method'](row)} |" if row["seconds"] else f"{row['case']}, {row['method']}: "
        )
        assert line in page
        assert (row["note"] in page) == (row["seconds"] is None or not row["note"])
    for record in records:
        assert record["command"] in page
        assert matrix["speeds"](record) in page
    assert "one link by gloo" in page


def test_saved_runs_are_drawn_anew_without_running_anything(matrix, folder, monkeypatch):
    pytest.importorskip("matplotlib", reason="plots need the extra `bench`")
    monkeypatch.delattr(subprocess, "run")
    drawn = []
    for _ in range(2):
        assert matrix["main"](["--plot", str(folder)]) == 0
        drawn.append((folder / "25m-2.svg").read_bytes())
        assert (folder / "25m-2.png").read_bytes().startswith(b"\x89PNG")
    assert drawn[0] == drawn[1]
    assert drawn[0].startswith(b"<?xml")
    assert b"fsdp2 -&gt; pp2" in drawn[0]
    assert (folder / "README.md").read_text().startswith("# Switches")


def test_tables_are_written_where_plots_cannot_be_drawn(matrix, folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not matrix["show"](folder)
    assert "pip install -c constraints.txt -e '.[bench]'" in capsys.readouterr().out
    assert "| `fsdp2 -> tp2` |" in (folder / "README.md").read_text()


def test_every_case_is_one_run_of_the_command_and_what_has_no_memory_is_named(matrix, tmp_path, monkeypatch, capsys):
    ran = []
    record = json.loads(next(SAVED.glob("*.json")).read_text())

    def runs(words, **_):
        ran.append(words[3:])
        return subprocess.CompletedProcess(words, 0, json.dumps({"model": "m", "ranks": 4, "rows": record["rows"]}))

    monkeypatch.setattr(subprocess, "run", runs)
    monkeypatch.setitem(matrix["run"].__globals__, "free_gb", lambda: 10.0)
    words = ["--models", "25m,600m", "--ranks", "4", "--repeats", "2", "--out", str(tmp_path)]
    assert matrix["run"](matrix["arguments"](words)) == 3
    assert capsys.readouterr().out.count("not run: 19 GB of memory are needed, 10 are free") == 3
    layouts = [(words[words.index("--from") + 1], words[words.index("--to") + 1]) for words in ran]
    assert layouts == [("fsdp4", "fsdp2.tp2"), ("fsdp4", "pp2.fsdp2"), ("dp2.fsdp2", "fsdp4")]
    kept = json.loads((tmp_path / "25m-4-fsdp4-pp2.fsdp2.json").read_text())
    assert kept["command"].startswith("dynatrain bench switch --json --model 25m --ranks 4 --from fsdp4 --to pp2.fsdp2")


@pytest.mark.parametrize(("ranks", "first"), [(2, "tp2"), (4, "fsdp2.tp2"), (8, "fsdp4.tp2")])
def test_cases_are_legal_layouts_of_all_ranks(matrix, ranks, first):
    from dynatrain.layout.text import parse_layout, print_layout  # noqa: PLC0415

    texts = [text for case in matrix["cases"](ranks) for text in case]
    assert texts[1] == first
    assert [print_layout(parse_layout(text)) for text in texts] == texts
    assert {parse_layout(text).world_size for text in texts} == {ranks}


@pytest.mark.parametrize("words", [["--ranks", "3"], ["--plot", "nowhere"]])
def test_what_cannot_be_is_refused(matrix, words, capsys):
    with pytest.raises(SystemExit) as ended:
        matrix["arguments"](words)
    assert ended.value.code == 2
    assert words[1] in capsys.readouterr().err
