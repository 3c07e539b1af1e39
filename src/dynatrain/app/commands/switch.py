"""``dynatrain switch RUN LAYOUT``."""

from typing import Literal

from dynatrain.app.ask import CODES, ask
from dynatrain.app.cli import Run, Text, call
from dynatrain.app.output import emit, say
from dynatrain.app.resize import dry_run_of, legal
from dynatrain.app.runs import RunWorld, certificate_for, config_of, find_run
from dynatrain.app.switches import switch_lines
from dynatrain.layout.text import print_layout
from dynatrain.space.run_check import check_run


def run(words: list[str]) -> int:
    """The command."""
    return call(switch, words)


def switch(
    run: Run,
    layout: Text,
    /,
    *,
    dry_run: bool = False,
    mode: Literal["keep", "tight", "configured"] = "configured",
    timeout: float = 300.0,
    json: bool = False,
) -> int:
    """Change the layout of a running run at its next step edge, and wait until that is done.

    Exit codes: 0 done, or already so; 2 the layout is not possible, nothing was tried; 3 tried and taken back (the run
    goes on as before), no answer in time, or the run failed.

    Args:
        run: name or folder.
        layout: the new layout.
        dry_run: print what the switch would move and need; ask for nothing.
        mode: keep the old state to the commit, or hand it over tensor by tensor; by default as the run's configuration.
        timeout: seconds to wait for the answer.
        json: print one JSON object.
    """
    folder = find_run(run)
    run_now = check_run(config_of(folder))
    world = RunWorld.of(folder)
    new = legal(run_now, layout, world.size)
    if dry_run:
        dry_run_of(run_now, world, new, mode, json=json)
        return 0
    arguments = {"layout": print_layout(new)} | ({} if mode == "configured" else {"mode": mode})
    request, answer = ask(folder, "switch", arguments, timeout)
    record = certificate_for(folder, request)
    if json:
        emit({"id": request, "outcome": answer.outcome, "message": answer.message, "certificate": record or None})
    else:
        say(f"{answer.outcome}{f': {answer.message}' if answer.message else ''}")
        say(*(switch_lines(record) if record else ()))
    return CODES[answer.outcome]
