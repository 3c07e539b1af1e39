"""``dynatrain prepare RUN LAYOUT``."""

from typing import Literal

from dynatrain.app.ask import ask, report
from dynatrain.app.cli import Run, Text, call
from dynatrain.app.resize import legal
from dynatrain.app.runs import RunWorld, config_of, find_run
from dynatrain.layout.text import print_layout
from dynatrain.space.run_check import check_run


def run(words: list[str]) -> int:
    """The command."""
    return call(prepare, words)


def prepare(
    run: Run,
    layout: Text,
    /,
    *,
    mode: Literal["keep", "tight", "configured"] = "configured",
    timeout: float = 300.0,
    json: bool = False,
) -> int:
    """Build and warm a layout beside training, so that a later dynatrain switch to it begins at the next step edge.

    One layout is kept. What it holds is said, and counts in the run's peak; it is free again with the next switch, when
    the run is parked or loses a rank, and when the present layout is prepared.

    Exit codes: 0 done; 2 the layout is not possible, nothing was tried; 3 it could not be prepared (the run goes on as
    before), or there was no answer in time.

    Args:
        run: name or folder.
        layout: what a switch is to lead to.
        mode: of that switch: keep holds the new layout's memory, tight some staging alone; by default as configured.
        timeout: seconds to wait for the answer.
        json: print one JSON object.
    """
    folder = find_run(run)
    new = legal(check_run(config_of(folder)), layout, RunWorld.of(folder).size)
    arguments = {"layout": print_layout(new)} | ({} if mode == "configured" else {"mode": mode})
    return report(folder, *ask(folder, "prepare", arguments, timeout), json=json)
