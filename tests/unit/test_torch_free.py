import pkgutil
import subprocess
import sys
from pathlib import Path

from tests.cli import ROOT, environment

import dynatrain

PACKAGES = ("config", "layout", "space", "plan", "judge", "simulate", "observe", "data", "app")
LAZY = {"dynatrain.data.prepare", "dynatrain.app.start"}
"""Modules with something to run or to start; imported like all others."""

BLOCKED = """
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def modules() -> list[str]:
    """Every module of the torch-free half, and of the command line."""
    root = Path(dynatrain.__file__).parent
    found = ["dynatrain.__main__"]
    for package in PACKAGES:
        name = f"dynatrain.{package}"
        found += [name, *(one.name for one in pkgutil.walk_packages([str(root / package)], f"{name}."))]
    return found


def blocked(*names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED, *names]
    return subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_torch_free_half_and_the_command_line_import_with_torch_blocked():
    names = modules()
    assert {"dynatrain.plan.build", "dynatrain.app.commands.train", *LAZY} <= set(names)
    done = blocked(*names)
    assert done.returncode == 0, done.stderr


def test_the_block_blocks():
    assert "torch is blocked" in blocked("dynatrain.models.decoder").stderr
