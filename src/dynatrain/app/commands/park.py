"""``dynatrain park RUN``."""

from dynatrain.app.cli import Run, call
from dynatrain.app.switches import ask_for_travel


def run(words: list[str]) -> int:
    """The command."""
    return call(park, words)


def park(run: Run = "", /, *, timeout: float = 300.0, json: bool = False) -> int:
    """Bring all state of a running run to host memory at its next step edge, and wait until its devices are free.

    Training pauses until dynatrain unpark; requests are answered meanwhile, and dynatrain stop brings the state back
    first, to save it.

    Exit codes: 0 parked, or it was already; 2 the run is not running; 3 it could not be (the run trains on), or there
    was no answer in time.

    Args:
        run: name or folder; by default the newest.
        timeout: seconds to wait for the answer.
        json: print one JSON object.
    """
    return ask_for_travel(run, "park", timeout, json=json)
