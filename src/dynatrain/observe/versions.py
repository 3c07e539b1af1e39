"""What this process runs on: versions that are tested and versions that are there. Reads metadata; imports nothing."""

import os
import platform
import sys
from importlib import metadata

import dynatrain

PYTHON = (3, 11)
"""The Python that is tested."""
TORCH = (2, 13)
"""The torch that is tested; its private parts differ between minor versions."""


_PINS = "Python {}.{}, and pip install 'torch=={}.{}.*'".format(*PYTHON, *TORCH)


class VersionError(ValueError):
    """Python or torch is not of the version that is tested; the text names both."""


def versions() -> dict[str, str]:
    """``dynatrain``, ``python`` and ``torch``; torch is empty where it is not installed."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return {"dynatrain": dynatrain.__version__, "python": platform.python_version(), "torch": torch}


def environment() -> dict[str, object]:
    """What a run writes down of its machine at the start: the content of ``environment.json``."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "versions": versions(),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "executable": sys.executable,
        "command": sys.argv,
    }


def require_tested(found: dict[str, str]) -> None:
    """Refuse to train on what was never tested.

    Args:
        found: as :func:`versions` gives it.

    Raises:
        VersionError: with every version that is another one.
    """
    problems = []
    for name, tested in (("python", PYTHON), ("torch", TORCH)):
        if tuple(found[name].split(".")[:2]) != tuple(map(str, tested)):
            have = f"{found[name]} is installed" if found[name] else "it is not installed"
            problems.append(f"{name} {'.'.join(map(str, tested))} is tested, {have}")
    if problems:
        raise VersionError(f"This version of dynatrain does not run here: {'; '.join(problems)}. Nearest: {_PINS}.")
