"""A plain FSDP2 loop, before and after ``Switcher``: few lines differ, and no number does."""

import difflib
import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist
from tests import ranks
from tests.dist.foreign import settle_in

RECIPES = Path(__file__).parents[2] / "recipes"
PLAIN, SWITCHED = RECIPES / "fsdp2_plain.py", RECIPES / "fsdp2_switched.py"


def test_twelve_lines_make_the_layout_of_a_foreign_loop_change():
    plain, switched = (path.read_text(encoding="utf-8").splitlines() for path in (PLAIN, SWITCHED))
    added = [line for line in difflib.ndiff(plain, switched) if line.startswith("+ ")]
    assert 0 < len(added) <= 12


def run_recipe(world, path):
    settle_in()
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(world.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(path), run_name="__main__")
    assert not dist.is_initialized()
    return said.getvalue()


def numbers(text):
    """Every step's numbers."""
    return [[float(found) for found in re.findall(r"[-\d.e]+\d", line)] for line in text.splitlines()]


def test_a_foreign_loop_computes_the_same_whether_its_layout_changes_or_not():
    said = []
    for path in (PLAIN, SWITCHED):
        found = ranks.run(4, lambda world, path=path: run_recipe(world, path), 60)
        assert all(isinstance(text, str) for text in found), found
        said.append(found[0])
    plain, switched = map(numbers, said)
    assert len(plain) == 24
    assert plain[-1][1] < plain[0][1] / 100  # it learns
    for one, other in zip(plain, switched, strict=True):
        assert other == pytest.approx(one, rel=0, abs=1e-11)  # of sums of 24 steps; the loss alone is exact to 1e-12
        assert other[1] == pytest.approx(one[1], rel=0, abs=1e-12)


@pytest.mark.sweep
def test_the_recipe_runs_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(SWITCHED)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert len(numbers(ran.stdout)) == 24, ran.stderr[-3000:]
