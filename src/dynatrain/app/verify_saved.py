"""Checking a checkpoint: its manifest, sizes and hashes, and that its boxes are every state, whole and once."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from dynatrain.app.mistake import is_mistake
from dynatrain.app.runs import config_of
from dynatrain.app.verify import Checked
from dynatrain.judge.shelves import judge_shelf
from dynatrain.observe.checkpoints import MANIFEST, CheckpointError, Manifest, damaged, named_step
from dynatrain.observe.run import RunFolder
from dynatrain.plan.plan import Boxes
from dynatrain.space.decoder import catalogue
from dynatrain.space.presets import resolve_model
from dynatrain.space.tensor import Catalogue, State, Tensor

if TYPE_CHECKING:
    from dynatrain.execute.dcp_folder import DcpFolder

_SHOWN = 10


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one of a checkpoint, or was meant as one."""
    return path.is_dir() and (named_step(path) is not None or (path / MANIFEST).exists())


def check_checkpoint(path: Path) -> Checked:
    """Check a checkpoint; in a run's folder also whether it has all states of the run's model, where that is known."""
    try:
        manifest = Manifest.read(path)
    except CheckpointError as error:
        return Checked(what=str(path), problems=(str(error),), saved=True)
    what = "weights only" if manifest.weights_only else f"{len(manifest.states)} kinds of state"
    claims = f"{path.name}: step {manifest.step}, {what}, {len(manifest.files)} files, written in {manifest.layout}"
    problems = damaged(path, manifest.files) or _inside(path, manifest)
    return Checked(what=str(path), claims=claims, problems=problems, saved=True)


def _inside(path: Path, manifest: Manifest) -> tuple[str, ...]:
    """What is wrong with the tensors of files that are as they were written."""
    from dynatrain.execute.dcp_folder import DcpFolder, FolderError  # noqa: PLC0415 - torch: other checks need none

    try:
        folder = DcpFolder(path)
        tensors, boxes = _held(folder)
        wrong = (*judge_shelf(tensors, boxes), *_missing(path, manifest, tensors))
        if not wrong:
            for one in chain.from_iterable(map(folder.stored, folder.shapes)):
                _ = one.tensor  # reads what it looks like, and refuses what is none
    except FolderError as error:
        return error.problems
    return wrong


def _held(folder: "DcpFolder") -> tuple[Catalogue, Boxes]:
    """The states in a folder, each as a tensor of its own shape, and the boxes that the files have of them."""
    tensors, boxes = [], {}
    for key, place in folder.places.items():
        if key in folder.shapes:
            tensor, state = _state_of(place)
            boxes[len(tensors), 0] = tuple(one.box for one in folder.stored(key))
            tensors.append(Tensor(tensor, folder.shapes[key], (), (), (State(state, "float32"),), ""))
    return tuple(tensors), boxes


def _state_of(place: Sequence[str | int]) -> tuple[str, str]:
    """Tensor and state, from where it stands in a state dict: model.T, optim.state.T.S, objects.O.S.T."""
    head, *rest = map(str, place)
    if head == "model":
        return ".".join(rest), "param"
    if head == "optim":
        return ".".join(rest[1:-1]), rest[-1]
    return rest[-1], ".".join(rest[:-1])


def _missing(path: Path, manifest: Manifest, tensors: Catalogue) -> Iterator[str]:
    """States that the manifest promises and no tensor has; and, in a run, what the run's model has and this not."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for tensor in tensors:
        found[tensor.name] |= {state.name for state in tensor.states}
    held = set().union(*found.values()) | {"buffer"}
    yield from (f"the manifest promises {state}, which no tensor has" for state in manifest.states if state not in held)
    run = RunFolder(path.absolute().parent.parent)
    if not run.exists:
        return
    try:
        config = config_of(run)
        if config.loop:  # it alone knows what it trains
            return
        shape = resolve_model(config.model.config)
    except ValueError as error:
        if not is_mistake(error):
            raise
        yield f"the model of run {run.name} cannot be made out: {error}"
        return
    model = catalogue(shape, optimizer="" if manifest.weights_only else config.optimizer.name)
    gone = [
        f"{tensor.name} {state.name}: the run's model has it, the files not"
        for tensor in model
        for number, state in enumerate(tensor.states)
        # In the files a buffer's value has the place that a parameter's has.
        if (state.name if number else "param") not in found.get(tensor.name, ())
    ]
    yield from gone[:_SHOWN]
    if len(gone) > _SHOWN:
        yield f"... and {len(gone) - _SHOWN} more"
