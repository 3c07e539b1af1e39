"""``dynatrain scale RUN N``."""

from typing import Annotated, Literal

import tyro

from dynatrain.app.ask import CODES, ask
from dynatrain.app.cli import Run, call
from dynatrain.app.output import emit, say
from dynatrain.app.resize import dry_run_of, layout_of_size
from dynatrain.app.runs import RunWorld, certificate_for, config_of, find_run
from dynatrain.app.switches import switch_lines
from dynatrain.layout.text import parse_layout
from dynatrain.observe.requests import Answer
from dynatrain.observe.run import RunFolder
from dynatrain.space.run_check import check_run

Size = Annotated[int, tyro.conf.Positional, tyro.conf.arg(metavar="N")]


def run(words: list[str]) -> int:
    """The command."""
    return call(scale, words)


def scale(
    run: Run,
    size: Size,
    /,
    *,
    layout: str = "",
    dry_run: bool = False,
    mode: Literal["keep", "tight", "configured"] = "configured",
    timeout: float = 300.0,
    json: bool = False,
) -> int:
    """Give a running run another number of ranks, and wait until that is done.

    Ranks that are to come are started and prepared while the others train; the highest ones leave. It returns when
    those that left are gone.

    Exit codes: 0 done, or already so; 2 that size or layout is not possible, nothing was tried; 3 tried and taken back
    (the run goes on as before), no answer in time, or the run failed.

    Args:
        run: name or folder.
        size: how many ranks there are to be.
        layout: the layout of that many ranks; by default the nearest to the present one.
        dry_run: print the layout and what the change would move and need; ask for nothing.
        mode: keep the old state to the commit, or hand it over tensor by tensor; by default as the run's configuration.
        timeout: seconds to wait for the answer.
        json: print one JSON object.
    """
    folder = find_run(run)
    run_now = check_run(config_of(folder))
    world = RunWorld.of(folder)
    new = layout_of_size(run_now, world.layout, size, layout)
    if dry_run:
        dry_run_of(run_now, world, parse_layout(new), mode, json=json)
        return 0
    wanted = {"size": size} | ({"layout": new} if layout else {}) | ({} if mode == "configured" else {"mode": mode})
    return tell_of_members(folder, *ask(folder, "scale", wanted, timeout), json=json)


def tell_of_members(folder: RunFolder, request: str, answer: Answer, *, json: bool, **more: object) -> int:
    """Say what became of a request for other members; the exit code.

    Args:
        folder: of the run.
        request: its id.
        answer: to it.
        json: print one JSON object.
        more: of that object.
    """
    record = certificate_for(folder, request)
    world = RunWorld.of(folder)
    if json:
        told = {"world": world.record, "certificate": record or None}
        emit({"id": request, "outcome": answer.outcome, "message": answer.message, **told, **more})
    else:
        say(f"{answer.outcome}{f': {answer.message}' if answer.message else ''}", world.text)
        say(*(switch_lines(record) if record else ()))
    return CODES[answer.outcome]
