"""``dynatrain reclaim RUN``."""

from typing import Literal

from dynatrain.app.ask import ask
from dynatrain.app.cli import Run, call
from dynatrain.app.commands.scale import tell_of_members
from dynatrain.app.runs import find_run


def run(words: list[str]) -> int:
    """The command."""
    return call(reclaim, words)


def reclaim(
    run: Run,
    /,
    *,
    layout: str = "",
    mode: Literal["keep", "tight", "configured"] = "configured",
    timeout: float = 300.0,
    json: bool = False,
) -> int:
    """Take all places back that were lent, with ranks on them, and wait until they train.

    Whoever had them is to have left them: a rank that finds no room there takes nothing, and the run goes on without.

    Exit codes: 0 done, or nothing is lent; 2 that layout is not possible, nothing was tried; 3 taken back (the run goes
    on as before), no answer in time, or the run failed.

    Args:
        run: name or folder.
        layout: the layout to come; by default that from before they were lent, or, where the run has had another one
            since, the nearest to that.
        mode: keep the old state to the commit, or hand it over tensor by tensor; by default as the run's configuration.
        timeout: seconds to wait for the answer.
        json: print one JSON object.
    """
    wanted = ({"layout": layout} if layout else {}) | ({} if mode == "configured" else {"mode": mode})
    folder = find_run(run)
    return tell_of_members(folder, *ask(folder, "reclaim", wanted, timeout), json=json)
