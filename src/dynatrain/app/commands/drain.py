"""``dynatrain drain RUN --rank R...``."""

from dynatrain.app.cli import Run, call
from dynatrain.app.commands.scale import ask_for_members
from dynatrain.app.mistake import MistakeError
from dynatrain.app.resize import layout_of_size
from dynatrain.app.runs import RunWorld, config_of, find_run
from dynatrain.space.run_check import check_run


def run(words: list[str]) -> int:
    """The command."""
    return call(drain, words)


def drain(run: Run, /, *, rank: tuple[int, ...], layout: str = "", deadline: float = 300.0, json: bool = False) -> int:
    """Take ranks out of a running run, and wait until their processes are gone and their memory is back.

    The run goes on with the others, whose ranks close up.

    Exit codes: 0 they are gone; 2 the run cannot go on without them, nothing was tried; 3 taken back (the run goes on
    as before), no answer in time, or the run failed.

    Args:
        run: name or folder.
        rank: which ones, by their present numbers (dynatrain status).
        layout: the layout of the ranks that stay; by default the nearest to the present one.
        deadline: seconds in which it has to begin; the answer is waited for as long.
        json: print one JSON object.
    """
    folder = find_run(run)
    world, leave = RunWorld.of(folder), sorted(set(rank))
    if unknown := [one for one in leave if not 0 <= one < world.size]:
        raise MistakeError(f"--rank {' '.join(map(str, unknown))}: the ranks are 0 .. {world.size - 1}.")
    if len(leave) == world.size:
        raise MistakeError(f"All {world.size} ranks would leave; at least one stays. To end the run: dynatrain stop.")
    new = layout_of_size(check_run(config_of(folder)), world.layout, world.size - len(leave), layout)
    wanted = {"leave": leave} | ({"layout": new} if layout else {})
    return ask_for_members(folder, wanted, deadline, json=json)
