"""``dynatrain switch RUN LAYOUT``."""

from typing import Literal

from dynatrain.app.ask import CODES, ask
from dynatrain.app.cli import Run, Text, call
from dynatrain.app.output import emit, say
from dynatrain.app.plan_text import head, numbers, plan_record, rank_table
from dynatrain.app.planned import change_of_model, timed
from dynatrain.app.runs import Progress, certificate_for, config_of, find_run
from dynatrain.app.switches import switch_lines
from dynatrain.layout.foreign import read_layout
from dynatrain.layout.layout import Layout
from dynatrain.layout.text import parse_layout, print_layout
from dynatrain.observe.log import Tail
from dynatrain.observe.run import RunFolder
from dynatrain.space.run_check import CheckedRun, check_run


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
    new = run_now.legal(read_layout(layout))
    if dry_run:
        _dry_run(folder, run_now, new, run_now.config.switching.mode if mode == "configured" else mode, json=json)
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


def _dry_run(folder: RunFolder, run: CheckedRun, new: Layout, mode: str, *, json: bool) -> None:
    """What the switch would move and need, from the layout that the run is in by its last step.

    Of ``auto`` it is what ``keep`` would: whether that fits is known to the ranks alone.
    """
    last = Progress.of(folder).last
    old = parse_layout(last["layout"]) if last else run.layout
    planned = change_of_model(
        run.shape,
        (old, new),
        mode="keep" if mode == "auto" else mode,
        dtype="float64" if run.config.precision.compute == "fp64" else "float32",
        optimizer=run.config.optimizer.name,
        budget_bytes=run.config.switching.budget_mib << 20,
        ranks_per_node=_ranks_per_node(folder, run.layout.world_size),
    )
    whole, took = timed(planned.whole)
    summary = planned.summary(whole)
    record = planned.record(whole, summary)
    if json:
        emit(plan_record(record, planned) | {"configured": mode})
        return
    say(*head(planned, run.config.model.config))
    if mode == "auto":
        say("The run decides itself: keep where that fits into memory, as planned here, else tight.", "")
    rank_table(summary)
    say(*numbers(planned, summary, record.plan_hash, took, None), "Nothing was asked of the run.")


def _ranks_per_node(folder: RunFolder, world_size: int) -> int | None:
    """As the run's agents planned last; None for all on one node, or where no agent has begun."""
    begun = [event for event in Tail(folder.events).new() if event["kind"] == "agent_started"]
    nodes = begun[-1]["nodes"] if begun else 1
    return world_size // nodes if nodes > 1 else None
