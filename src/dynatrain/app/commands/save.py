"""``dynatrain save [RUN]``."""

from dynatrain.app.ask import ask, report
from dynatrain.app.cli import Run, call
from dynatrain.app.runs import find_run


def run(words: list[str]) -> int:
    """The command."""
    return call(save, words)


def save(run: Run = "", /, *, timeout: float = 600.0, json: bool = False) -> int:
    """Save a running run beside training, and wait until the checkpoint is complete.

    Exit codes: 0 saved, or that step was saved already; 2 the run is not running; 3 it could not be saved, and goes on.

    Args:
        run: name or folder; by default the newest.
        timeout: seconds to wait for the answer.
        json: print one JSON object.
    """
    folder = find_run(run)
    request, answer = ask(folder, "save", {}, timeout)
    return report(folder, request, answer, json=json)
