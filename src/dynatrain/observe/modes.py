"""The modes of a switch, by name: the one list that requests, plans and certificates are held against."""

import difflib

DECIDED = ("keep", "tight")
"""The old state lives to the commit (``keep``), or is handed over granule by granule (``tight``)."""

MODES = (*DECIDED, "auto")
"""What can be asked for: ``auto`` is ``keep`` where it fits into memory, else ``tight``."""


def mode_problem(mode: str) -> str:
    """What is wrong with the name of a mode that is asked for, and the nearest one; empty where nothing is."""
    if mode in MODES:
        return ""
    near = difflib.get_close_matches(mode, MODES, n=1, cutoff=0.0) or MODES[-1:]
    return f"there is no mode {mode!r}; the modes are {', '.join(MODES)} (nearest: {near[0]})"
