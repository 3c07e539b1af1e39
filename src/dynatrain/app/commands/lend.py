"""``dynatrain lend RUN --rank R...`` or ``--count N``."""

from typing import Literal

from dynatrain.app.ask import ask
from dynatrain.app.cli import Run, call
from dynatrain.app.commands.scale import tell_of_members
from dynatrain.app.handle import to_lend
from dynatrain.app.resize import layout_of_size
from dynatrain.app.runs import RunWorld, config_of, find_run
from dynatrain.space.run_check import check_run


def run(words: list[str]) -> int:
    """The command."""
    return call(lend, words)


def lend(
    run: Run,
    /,
    *,
    rank: tuple[int, ...] = (),
    count: int = 0,
    layout: str = "",
    mode: Literal["keep", "tight", "configured"] = "configured",
    timeout: float = 300.0,
    json: bool = False,
) -> int:
    """Give ranks' places to another program, and wait until their processes are gone and their memory is back.

    The run goes on with the others. Nobody takes the places until dynatrain reclaim.

    Exit codes: 0 they are free; 2 the run cannot go on without them, nothing was tried; 3 taken back (the run goes on
    as before), no answer in time, or the run failed.

    Args:
        run: name or folder.
        rank: which ones, by their present numbers (dynatrain status).
        count: how many, the highest ones; in place of --rank.
        layout: the layout of the ranks that stay; by default the nearest to the present one.
        mode: keep the old state to the commit, or hand it over tensor by tensor; by default as the run's configuration.
        timeout: seconds to wait for the answer.
        json: print one JSON object.
    """
    folder = find_run(run)
    world = RunWorld.of(folder)
    wanted = to_lend(world, rank, count)
    left = wanted.get("size") or world.size - len(wanted["leave"])
    new = layout_of_size(check_run(config_of(folder)), world.layout, left, layout)
    wanted |= ({"layout": new} if layout else {}) | ({} if mode == "configured" else {"mode": mode})
    return tell_of_members(folder, *ask(folder, "lend", wanted, timeout), json=json)
