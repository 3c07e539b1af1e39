"""``dynatrain stop [RUN]``."""

from dynatrain.app.ask import ask, report
from dynatrain.app.cli import Run, call
from dynatrain.app.runs import find_run
from dynatrain.observe.requests import Answer


def run(words: list[str]) -> int:
    """The command."""
    return call(stop, words)


def stop(run: Run = "", /, *, timeout: float = 660.0, json: bool = False) -> int:
    """End a running run at its next step edge, and wait until it is saved.

    Exit codes: 0 it stops, or had ended before; 3 it did not answer in time.

    Args:
        run: name or folder; by default the newest.
        timeout: seconds to wait for the answer, which comes when the run is saved.
        json: print one JSON object.
    """
    folder = find_run(run)
    if folder.liveness() in {"ended", "gone"}:
        request, answer = "", Answer(outcome="unchanged", message="the run had ended before")
    else:
        request, answer = ask(folder, "stop", {}, timeout)
    return report(folder, request, answer, json=json)
