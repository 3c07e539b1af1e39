"""The watchdog of all tests (``tests/conftest.py``): a test that hangs says where, and so does every rank below it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.clock

HANGING = """
import subprocess, sys
from pathlib import Path
import pytest

CHILD = '''
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR1)
def a_rank_that_hangs():
    time.sleep(60)
a_rank_that_hangs()
'''

@pytest.mark.timeout(5)
def test_that_hangs():
    with Path("rank.log").open("w") as log, subprocess.Popen([sys.executable, "-c", CHILD], stderr=log) as child:
        Path("pid").write_text(str(child.pid))
        try:
            child.wait()
        finally:
            child.kill()
"""


def test_a_test_that_hangs_prints_its_stacks_and_those_of_its_ranks_before_it_is_ended(tmp_path):
    (tmp_path / "conftest.py").write_text(Path(__file__).parents[1].joinpath("conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 300\n")
    (tmp_path / "test_it.py").write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=60, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    _, mark, rest = said.partition(
        "test_it.py::test_that_hangs hangs; it is ended after 5 s. The stacks of this process:"
    )
    assert mark, said
    own, mark, below = rest.partition(f"process {(tmp_path / 'pid').read_text()}:")
    assert mark, said
    assert "in test_that_hangs" in own
    assert "in a_rank_that_hangs" in below
