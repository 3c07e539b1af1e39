"""What is said when a run has ended."""

from collections.abc import Iterator

from dynatrain.app.output import emit, say
from dynatrain.app.progress import validation_text
from dynatrain.app.runs import Progress, certificates
from dynatrain.app.switches import switch_table
from dynatrain.cluster.causes import SAVED
from dynatrain.observe.run import RunFolder


def conclude(run: RunFolder | None, code: int, *, json: bool) -> int:
    """Say how a run has ended, where this process is to speak of it; gives its exit code back."""
    if run is not None and json:
        emit(_record(run, code))
    elif run is not None:
        _print(run, code)
    return code


def _print(run: RunFolder, code: int) -> None:
    """The table of switches, the loss, and what to do next."""
    if records := certificates(run):
        say("")
        switch_table(records)
    say(*_lines(run, code))


def _lines(run: RunFolder, code: int) -> Iterator[str]:
    progress = Progress.of(run)
    yield ""
    if progress.lines:
        first, last = progress.lines[0], progress.lines[-1]
        yield f"loss {first['loss']:.4f} in the first step, {last['loss']:.4f} after {last['step'] + 1} steps"
    if progress.validation:
        yield validation_text(progress.validation[-1])
    name = run.path if run.path.parent.name != "runs" else run.name
    if code == 0:
        yield f"check it:  dynatrain check {name}"
    elif code == SAVED:
        yield f"stopped and saved; go on with it:  dynatrain train --run {name}"
    else:
        yield f"ended with code {code}; what the ranks said:  dynatrain logs {name}"


def _record(run: RunFolder, code: int) -> dict[str, object]:
    """The same for programs."""
    progress = Progress.of(run)
    return {
        "run": str(run.path),
        "exit": code,
        "steps": len({line["step"] for line in progress.lines}),  # some were trained again after a failure
        "first_loss": progress.lines[0]["loss"] if progress.lines else None,
        "last_loss": progress.lines[-1]["loss"] if progress.lines else None,
        "validation_loss": progress.validation[-1]["loss"] if progress.validation else None,
        "switches": list(certificates(run)),
    }
