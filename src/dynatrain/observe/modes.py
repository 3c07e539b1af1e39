"""The modes of a switch, by name: the one list that requests, plans and certificates are held against."""

import difflib

DECIDED = ("keep", "tight")
"""The old state lives to the commit (``keep``), or is handed over granule by granule (``tight``)."""

MODES = (*DECIDED, "auto")
"""What can be asked for: ``auto`` is ``keep`` where it fits into memory, else ``tight``."""


def mode_problem(mode: str, among: tuple[str, ...] = MODES) -> str:
    """What is wrong with the name of a mode, and the nearest one; empty where it is one of ``among``."""
    if mode in among:
        return ""
    near = difflib.get_close_matches(mode, among, n=1, cutoff=0.0) or among[-1:]
    return f"there is no mode {mode!r}; the modes are {', '.join(among)} (nearest: {near[0]})"
