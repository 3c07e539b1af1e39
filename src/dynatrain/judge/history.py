"""Whether the certificates of one run can all be true."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any


def check_history(records: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What the certificates of a run contradict each other in; empty where nothing.

    Args:
        records: as read from JSON, each without problems of its own, in the order of the switches.
    """
    return tuple(problem for before, after in pairwise(records) for problem in _pair(before, after))


def _pair(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    name = f"switch {after['switch']}"
    if after["run_id"] != before["run_id"]:
        yield f"{name} is of run {after['run_id']}, the one before it of run {before['run_id']}"
    if after["switch"] <= before["switch"]:
        yield f"{name} follows switch {before['switch']}"
    if after["attempt"] != before["attempt"]:
        if after["attempt"] < before["attempt"]:
            yield f"{name} is of attempt {after['attempt']}, the one before it of attempt {before['attempt']}"
        return  # the run went on from where it was saved, in a layout of its own
    if after["step"] < before["step"]:
        yield f"{name} is at step {after['step']}, the one before it at step {before['step']}"
    left_in = before["to"] if before["outcome"] == "committed" else before["from"]
    if before["outcome"] != "failed" and after["from"] != left_in:
        yield f"{name} starts from {after['from']}, but switch {before['switch']} left the run in {left_in}"
