"""How long a change of members will take, from what earlier switches of the same run have taken. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dynatrain.app.output import seconds, size

BESIDE = ("build", "warm")
AT_THE_EDGE = ("quiesce", "check", "compile", "commit")
EDGES = 3
"""Steps that pass until all ranks have heard, are ready, and are at one edge."""
LAST = 5
"""Switches that are looked at, the newest ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What is expected.

    Attributes:
        seconds: until it is done; None where nothing is known to tell it from.
        text: the same for people, and from what it is told.
    """

    seconds: float | None
    text: str


def predict(moved: int, switches: Sequence[Mapping[str, Any]], steps: Iterable[float]) -> Prediction:
    """How long a crossing without newcomers takes, until its leavers may go.

    What is moved goes at the rate of earlier switches; all else takes as long as it did in them. Crossings are taken
    where there are any, since they make groups anew, and other switches where there are none.

    Args:
        moved: bytes that it moves between ranks.
        switches: certificates of the run, oldest first.
        steps: seconds of the latest steps, in the present layout.
    """
    done = [one for one in switches if one["outcome"] == "committed"]
    crossings = [one for one in done if one["world"]["old"] != one["world"]["new"]]
    alike = (crossings or done)[-LAST:]
    if not alike:
        return Prediction(seconds=None, text="how long it takes is not known: this run has made no switch yet")
    rates = [one["bytes"]["moved"] / one["seconds"]["move"] for one in done[-LAST:] if _has_rate(one)]
    rest = median(sum(one["seconds"][phase] or 0.0 for phase in (*BESIDE, *AT_THE_EDGE)) for one in alike)
    moving = moved / median(rates) if rates else 0.0
    waiting = EDGES * median([*steps] or [0.0])
    numbers = ", ".join(str(one["switch"]) for one in alike)
    speed = f"{size(moved)} at {size(int(median(rates)))}/s" if rates else f"{size(moved)} at an unknown rate"
    text = (
        f"about {seconds(rest + moving + waiting)}: {speed}, {seconds(rest)} for all else, as in switch"
        f"{'es' if len(alike) > 1 else ''} {numbers} of this run, and {EDGES} steps"
    )
    return Prediction(seconds=rest + moving + waiting, text=text)


def _has_rate(record: Mapping[str, Any]) -> bool:
    return bool(record["bytes"]["moved"] and record["seconds"]["move"])


def seconds_of(text: str, problem: Callable[[str], Exception]) -> float:
    """A duration as people write it: ``90``, ``90s``, ``1.5m`` or ``2h``, in seconds.

    Args:
        text: the duration.
        problem: makes the error to be raised out of what is wrong.
    """
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        value = float(number) * units[unit]
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise problem(f"{text!r} is no duration: a number above 0 of seconds, or one with s, m or h; for example 90s")
    return value
