"""``dynatrain drain RUN --rank R... | --host H...``."""

from typing import Any

from dynatrain.app.ask import ask
from dynatrain.app.cli import Run, call
from dynatrain.app.commands.scale import tell_of_members
from dynatrain.app.mistake import MistakeError
from dynatrain.app.output import say
from dynatrain.app.predicted import Prediction, predict, seconds_of
from dynatrain.app.resize import change_of_run, layout_of_size
from dynatrain.app.runs import Progress, RunWorld, certificates, config_of, find_run
from dynatrain.cluster.parting import largest
from dynatrain.layout.text import parse_layout
from dynatrain.observe.run import RunFolder
from dynatrain.space.run_check import CheckedRun, check_run

STEPS = 20
"""Latest steps whose time is looked at."""


def run(words: list[str]) -> int:
    """The command."""
    return call(drain, words)


def drain(
    run: Run,
    /,
    *,
    rank: tuple[int, ...] = (),
    host: tuple[str, ...] = (),
    layout: str = "",
    deadline: str = "300s",
    json: bool = False,
) -> int:
    """Take ranks or hosts out of a running run, and wait until their processes are gone and their memory is back.

    The run goes on with the others, whose ranks close up. A host leaves with all its ranks and its agent, and with as
    many more ranks as there is no layout for. Before, it is said how long that takes, as far as earlier switches of the
    run tell it; a deadline that cannot be kept by that is refused.

    Exit codes: 0 they are gone; 2 the run cannot go on without them, or not by the deadline, nothing was tried; 3 taken
    back (the run goes on as before), no answer in time, or the run failed.

    Args:
        run: name or folder.
        rank: which ones, by their present numbers (dynatrain status).
        host: or which hosts, by node number or by name (dynatrain status).
        layout: the layout of the ranks that stay; by default the nearest to the present one.
        deadline: by when they are to be gone: 90, 90s, 2m.
        json: print one JSON object.
    """
    folder = find_run(run)
    world, checked = RunWorld.of(folder), check_run(config_of(folder))
    within = seconds_of(deadline, lambda what: MistakeError(f"--deadline: {what}."))
    nodes = _nodes(world, host)
    if bool(nodes) == bool(rank):
        raise MistakeError("Which ones? --rank R... or --host H..., one of both.")
    leave = world.on(nodes) if nodes else sorted(set(rank))
    new = _layout(checked, world, leave, layout, whole=bool(nodes))
    expected = _expected(folder, checked, world, leave, new)
    if expected.seconds is not None and expected.seconds > within:
        raise MistakeError(
            f"--deadline={deadline} cannot be kept: it takes {expected.text}. Nearest: --deadline="
            f"{int(expected.seconds) + 1}s; or dynatrain stop {folder.name}, which saves."
        )
    if not json:
        say(f"{len(leave)} of {world.size} ranks leave, {world.layout} -> {new}: {expected.text}")
    wanted: dict[str, Any] = {"nodes": nodes} if nodes else {"leave": leave}
    request, answer = ask(folder, "scale", wanted | ({"layout": new} if layout else {}), within)
    return tell_of_members(folder, request, answer, json=json, predicted_seconds=expected.seconds)


def _layout(run: CheckedRun, world: RunWorld, leave: list[int], named: str, *, whole: bool) -> str:
    """The layout of the ranks that stay; ``whole`` hosts may take more ranks with them, and spares come for theirs.

    Raises:
        MistakeError: nobody would stay, or there are no such ranks.
        LayoutError: there is none.
    """
    if unknown := [one for one in leave if not 0 <= one < world.size]:
        raise MistakeError(f"--rank {' '.join(map(str, unknown))}: the ranks are 0 .. {world.size - 1}.")
    if len(leave) == world.size:
        raise MistakeError(f"All {world.size} ranks would leave; at least one stays. To end the run: dynatrain stop.")
    if not leave:
        return world.layout
    most = min(world.size - len(leave) + (run.config.world.spares if whole else 0), world.size)
    if named or not whole:
        return layout_of_size(run, world.layout, parse_layout(named).world_size if named and whole else most, named)
    return largest(most, lambda size: layout_of_size(run, world.layout, size, ""))[1]


def _nodes(world: RunWorld, hosts: tuple[str, ...]) -> list[int]:
    """The nodes that people mean.

    Raises:
        MistakeError: there are no such hosts, or one cannot be let go.
    """
    nodes = {node for text in hosts for node in _nodes_of(world, text)}
    if 0 in nodes:
        ranks = " ".join(map(str, world.on([0])))
        raise MistakeError(
            "Node 0 leads the run and holds its store: it is not drained while the run goes on. Nearest: SIGTERM to "
            "its agent, after which others lead; dynatrain stop, which saves; or "
            f"--rank {ranks}, which frees it of its ranks."
        )
    return sorted(nodes)


def _nodes_of(world: RunWorld, text: str) -> list[int]:
    there = ", ".join(f"{node} ({name})" for node, name in sorted(world.hosts.items()))
    found = [n for n, name in world.hosts.items() if text in {str(n), name, name.partition(".")[0]}]
    if not found:
        raise MistakeError(f"--host {text}: the run's hosts are {there or 'not known: it has not begun'}.")
    if len(found) > 1:
        raise MistakeError(f"--host {text} is on nodes {found}; name one by its number. There are {there}.")
    return found


def _expected(folder: RunFolder, run: CheckedRun, world: RunWorld, leave: list[int], new: str) -> Prediction:
    """How long it takes."""
    if not leave:
        return Prediction(seconds=0.0, text="they have no ranks, so nothing is moved")
    old, then = parse_layout(world.layout), parse_layout(new)
    stayers = [rank for rank in range(world.size) if rank not in leave]
    holders = (*stayers, *range(world.size, world.size + then.world_size))[: then.world_size]  # and newcomers
    mode = run.config.switching.mode
    change = change_of_run(run, old, then, "keep" if mode == "auto" else mode, world.ranks_per_node, holders)
    lines = [line for line in Progress.of(folder).lines if line["layout"] == world.layout]
    return predict(change.bytes_moved, certificates(folder), [line["seconds"] for line in lines[-STEPS:]])
