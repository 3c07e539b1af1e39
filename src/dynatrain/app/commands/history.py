"""``dynatrain history [RUN]``."""

from dynatrain.app.cli import Run, call
from dynatrain.app.output import emit, say
from dynatrain.app.runs import certificates, find_run, switch_folders
from dynatrain.app.switches import switch_table


def run(words: list[str]) -> int:
    """The command."""
    return call(history, words)


def history(run: Run = "", /, *, json: bool = False) -> int:
    """The switches of a run: bytes, seconds and digests of each, from its certificates.

    Args:
        run: name or folder; by default the newest.
        json: print one JSON object.
    """
    folder = find_run(run)
    records = certificates(folder)
    if json:
        emit({"run": str(folder.path), "switches": list(records)})
        return 0
    if records:
        switch_table(records)
    unsound = len(switch_folders(folder)) - len(records)
    if unsound:
        say(f"{unsound} without a sound certificate; see dynatrain check {folder.name}")
    elif not records:
        say(f"{folder.name} has made no switch.")
    return 0
