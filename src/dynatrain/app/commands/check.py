"""``dynatrain check PATH``."""

from pathlib import Path
from typing import Annotated

import tyro

from dynatrain.app.cli import call
from dynatrain.app.mistake import MistakeError
from dynatrain.app.output import emit, say
from dynatrain.app.runs import switch_folders
from dynatrain.app.verify import Checked, check_file, check_switch
from dynatrain.app.verify_saved import check_checkpoint, is_checkpoint
from dynatrain.judge.history import check_history
from dynatrain.observe.checkpoints import checkpoints
from dynatrain.observe.run import RunFolder

Where = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]

UNSOUND = 3
_KINDS = ((False, "switches"), (True, "checkpoints"))


def run(words: list[str]) -> int:
    """The command."""
    return call(check, words)


def check(path: Where, /, *, json: bool = False) -> int:
    """Check offline what a run wrote down: a certificate or plan, a switch, a checkpoint, or a run with all of them.

    A certificate must have every field and not contradict itself: every byte of the new layout written exactly once,
    equal digests before and after. A plan is derived anew, compared by its hash, and judged. In a run, each switch must
    start in the layout in which the one before it left the run. A checkpoint must have every file in its size and with
    its hash, and every state whole, each element once.

    Exit codes: 0 sound; 2 there is nothing to check; 3 not sound.

    Args:
        path: a certificate.json or plan.json, a folder switches/NNN or checkpoints/step_N, or a run's name or folder.
        json: print one JSON object.
    """
    results, across = _checked(path)
    sound = not across and not any(result.problems for result in results)
    if json:
        listed = [{"what": one.what, "claims": one.claims, "problems": one.problems} for one in results]
        emit({"path": path, "sound": sound, "checked": listed, "problems": across})
        return 0 if sound else UNSOUND
    for result in results:
        say(f"{'sound' if not result.problems else 'NOT SOUND'}  {result.claims or result.what}")
        say(*(f"  - {problem}" for problem in result.problems))
    say(*(f"NOT SOUND  {problem}" for problem in across))
    if len(results) != 1:
        kinds = [(sum(one.saved is kind for one in results), name) for kind, name in _KINDS]
        counted = " and ".join(f"{count} {name}" for count, name in kinds if count or name == "switches")
        say(f"{counted} checked, {sum(not result.problems for result in results)} sound")
    return 0 if sound else UNSOUND


def _checked(text: str) -> tuple[list[Checked], tuple[str, ...]]:
    """The results, and what the switches of a run contradict each other in."""
    path = Path(text)
    if path.is_file():
        return [check_file(path)], ()
    if (path / "certificate.json").exists() or (path / "plan.json").exists():
        return [check_switch(path)], ()
    if is_checkpoint(path):
        return [check_checkpoint(path)], ()
    if path.is_dir() and not RunFolder(path).exists:
        raise MistakeError(
            f"{path} is neither a run's folder nor that of a switch (which holds certificate.json) or of a checkpoint "
            "(which holds manifest.json)."
        )
    run = RunFolder.find(text)
    results = [check_switch(folder) for folder in switch_folders(run)]
    across = check_history([result.record for result in results if result.record])
    saved = (check_checkpoint(folder) for folder in checkpoints(run.checkpoints))
    # A running run removes old checkpoints meanwhile: what is gone is not judged.
    return results + [one for one in saved if Path(one.what).exists()], across
