"""Text for people and JSON for programs: one place that knows how numbers look and where output goes."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def console(*, error: bool = False) -> Console:
    """Where text for people goes. Written as it is: no markup, no highlighting, no wrapping into a terminal's width."""
    return Console(file=sys.stderr if error else sys.stdout, highlight=False, markup=False, soft_wrap=True)


def say(*lines: str) -> None:
    """Print lines for people."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def emit(record: Mapping[str, object]) -> None:
    """Print the one JSON object of a command that was called with ``--json``."""
    sys.stdout.write(json.dumps(record) + "\n")


def columns(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table as wide as it is: the first column is text, the others are numbers."""
    cells = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        say("  ".join((first.ljust(widths[0]), *numbers)).rstrip())


def size(count: int | None) -> str:
    """Bytes with a decimal unit and three digits, ``27.5 MB``; a dash where they are not known."""
    if count is None:
        return "-"
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def seconds(value: float | None) -> str:
    """A duration with a unit that fits, ``3.2 ms`` or ``1.25 s``; a dash where it is not known."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if value < 120 else f"{int(value) // 60}:{int(value) % 60:02d} min"
