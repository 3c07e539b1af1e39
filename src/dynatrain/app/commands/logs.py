"""``dynatrain logs [RUN]``."""

from dynatrain.app.cli import Rank, Run, call
from dynatrain.app.mistake import MistakeError
from dynatrain.app.output import emit, say
from dynatrain.app.runs import find_run


def run(words: list[str]) -> int:
    """The command."""
    return call(logs, words)


def logs(run: Run = "", /, *, rank: Rank = None, json: bool = False) -> int:
    """What the ranks of a run printed, each line behind the name of its log.

    Args:
        run: name or folder; by default the newest.
        rank: print the log of this rank alone.
        json: print one JSON object.
    """
    folder = find_run(run)
    paths = sorted(folder.logs.glob("*.log")) if rank is None else [folder.log(rank)]
    missing = [path for path in paths if not path.exists()]
    if missing:
        there = ", ".join(path.stem for path in sorted(folder.logs.glob("*.log"))) or "no log yet"
        raise MistakeError(f"Run {folder.name} has no {missing[0].stem}; there is {there}.")
    texts = {path.stem: path.read_text(encoding="utf-8", errors="replace") for path in paths}
    if json:
        emit({"run": str(folder.path), "logs": texts})
        return 0
    for name, text in texts.items():
        say(*(f"{name}  {line}" for line in text.splitlines()))
    return 0
