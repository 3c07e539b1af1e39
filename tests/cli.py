"""The command line as a process of its own, for tests."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def record(self) -> dict:
        """Its one JSON object."""
        return json.loads(self.out)


def environment() -> dict[str, str]:
    """The source tree and the tests importable, everything on the loopback."""
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "GLOO_SOCKET_IFNAME": "lo"}


def dynatrain(*words: str, cwd: Path, before: tuple[str, ...] = ("-m", "dynatrain"), timeout: float = 60) -> Said:
    """Run ``dynatrain`` with ``words`` in ``cwd``."""
    command = [sys.executable, *before, *words]
    done = subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Said(done.returncode, done.stdout, done.stderr)


TITLES = ["switch", "after", "outcome", "moved", "re-laid", "adopted", "stall", "lost", "floor", "digest equal"]


def switch_rows(text: str) -> list[list[str]]:
    """The cells of each row of the table of switches within a text: number, change, then as :data:`TITLES` say."""
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    first = lines.index(TITLES) + 1
    rows = lines[first:]
    return rows[: next((i for i, row in enumerate(rows) if len(row) <= 1), len(rows))]
