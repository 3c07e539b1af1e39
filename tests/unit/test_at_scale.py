"""The page of large models says what the command says."""

import re
import runpy

import pytest
from tests.cli import ROOT

PAGE = (ROOT / "docs" / "at-scale.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def printed():
    return list(runpy.run_path(str(ROOT / "benchmarks" / "at_scale.py"))["tables"]())


def test_every_number_of_the_tables_is_the_command_s(printed):
    assert "\n".join(printed).strip() in PAGE


def test_no_ratio_is_above_1_2(printed):
    rows = [line.split(" | ") for line in printed if line.startswith("| `")]
    assert len(rows) == 10
    assert all(1 <= float(row[at]) <= 1.2 for row in rows for at in (4, 6))


def test_the_page_names_the_keys_of_a_description():
    from dynatrain.simulate.machines import Machines  # noqa: PLC0415

    keys = re.findall(r"^    ([a-z_]+) = ", PAGE, re.MULTILINE)
    assert len(keys) == 7
    assert set(keys) <= set(Machines.__slots__)
