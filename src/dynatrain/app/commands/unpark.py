"""``dynatrain unpark RUN``."""

from dynatrain.app.cli import Run, call
from dynatrain.app.switches import ask_for_travel


def run(words: list[str]) -> int:
    """The command."""
    return call(unpark, words)


def unpark(run: Run = "", /, *, timeout: float = 300.0, json: bool = False) -> int:
    """Bring the state of a parked run back to its devices, and wait until it trains on.

    Exit codes: 0 it trains, or was not parked; 2 the run is not running; 3 the devices have no room yet (it stays
    parked), or there was no answer in time.

    Args:
        run: name or folder; by default the newest.
        timeout: seconds to wait for the answer.
        json: print one JSON object.
    """
    return ask_for_travel(run, "unpark", timeout, json=json)
