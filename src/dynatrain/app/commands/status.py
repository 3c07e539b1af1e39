"""``dynatrain status [RUN]``."""

import time
from typing import Any

from dynatrain.app.cli import Run, call
from dynatrain.app.output import emit, say
from dynatrain.app.progress import step_text, validation_text
from dynatrain.app.runs import Progress, RunWorld, certificates, find_run
from dynatrain.observe.checkpoints import MANIFEST, CheckpointError, Manifest, newest
from dynatrain.observe.mark import AgentMark, Liveness
from dynatrain.observe.run import RunFolder


def run(words: list[str]) -> int:
    """The command."""
    return call(status, words)


def status(run: Run = "", /, *, json: bool = False) -> int:
    """What a run is doing.

    Args:
        run: name or folder; by default the newest.
        json: print one JSON object.
    """
    folder = find_run(run)
    mark, alive, progress = folder.agent(), folder.liveness(), Progress.of(folder)
    last, world = progress.last, RunWorld.of(folder)
    age = round(time.time() - last["time"], 1) if last else None
    saved = _saved(folder)
    if json:
        emit(
            {
                "run": str(folder.path),
                "agent": alive or "none",
                "exit": mark.exit if mark else None,
                "world": world.record,
                "hosts": {str(node): name for node, name in world.hosts.items()},
                "lent": world.lent,
                "parked": world.parked,
                "ready": {"layout": world.ready[0], "bytes": world.ready[1]} if world.ready else None,
                "steps": progress.steps,
                "last": last,
                "age_seconds": age,
                "validation": progress.validation[-1] if progress.validation else None,
                "checkpoint": saved,
                "switches": len(certificates(folder)),
            }
        )
        return 0
    say(f"{folder.name}: {_state(mark, alive)}", f"  {world.text}")
    if len(world.hosts) > 1:
        say(*(f"  node {node}, {name}: {_ranks(world.on([node]))}" for node, name in sorted(world.hosts.items())))
    if last:
        say(f"  {step_text(last, progress.steps)}  ({age:,.0f} s ago)")
    if progress.validation:
        say(f"  {validation_text(progress.validation[-1])}")
    if saved:
        only = ", weights only" if saved["weights_only"] else ""
        say(f"  saved at step {saved['step']}{only}  ({saved['age_seconds']:,.0f} s ago)")
    if records := certificates(folder):
        committed = sum(record["outcome"] == "committed" for record in records)
        say(f"  {len(records)} switches, {committed} committed; dynatrain history {folder.name} lists them")
    return 0


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else "no ranks"


def _saved(run: RunFolder) -> dict[str, Any] | None:
    """The newest checkpoint that can be used; None where there is none."""
    folder, _ = newest(run.checkpoints)
    if folder is None:
        return None
    try:
        manifest = Manifest.read(folder)
        written = (folder / MANIFEST).stat().st_mtime
    except (CheckpointError, OSError):  # its run has removed it meanwhile
        return None
    age = round(max(0.0, time.time() - written), 1)
    return {"step": manifest.step, "path": str(folder), "age_seconds": age, "weights_only": manifest.weights_only}


def _state(mark: AgentMark | None, alive: Liveness | None) -> str:
    if mark is None or alive is None:
        return "was never started"
    return {
        "alive": f"running (process {mark.pid})",
        "ended": f"ended with code {mark.exit}",
        "gone": f"its agent, process {mark.pid} on {mark.host}, was killed",
        "elsewhere": f"driven by process {mark.pid} on {mark.host}, which has lately given a sign of life",
    }[alive]
