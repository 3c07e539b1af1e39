"""Which rank's end was the first cause, and how to say it. Pure."""

from collections.abc import Iterable

from dynatrain.cluster.context import Report
from dynatrain.cluster.kernel import signal_name

SAVED = 75
"""A rank's exit code, and then the agent's: the run has stopped before its end, saved, and can go on."""


def ended_badly(report: Report) -> bool:
    """Whether a rank's end is a failure of the run."""
    return report.kind == "ended" and (report.code not in (0, SAVED) or report.signal != 0)


def first_cause(ends: Iterable[Report]) -> Report:
    """The end that led to the others.

    When a rank dies, its neighbours raise within milliseconds, and all ends may be collected in one go, in no order.
    A rank that left no words was killed: its neighbours had the time to say something. Among ranks that raised, the
    first to raise.

    Args:
        ends: bad ends on one machine, at least one.
    """
    return min(ends, key=lambda report: (bool(report.words), report.spoken, report.member))


def say_end(report: Report) -> str:
    """``was killed by SIGKILL``, ``raised ValueError: ...`` or ``ended with code 7``."""
    if report.signal:
        return f"was killed by {signal_name(report.signal)}"
    if report.words:
        return f"raised {report.words}"
    return f"ended with code {report.code}"


def names(ranks: Iterable[int]) -> str:
    """``rank 2`` or ``ranks 0, 3``."""
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) != 1 else ''} {', '.join(map(str, listed))}"
