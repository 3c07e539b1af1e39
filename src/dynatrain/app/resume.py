"""Going on with a run: what may be other than it was, from which checkpoint, and in which layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynatrain.app.mistake import MistakeError
from dynatrain.config.own import load_own, own_toml
from dynatrain.config.run import RunConfig, Section
from dynatrain.layout.text import parse_layout
from dynatrain.observe.atomic import write_atomically
from dynatrain.observe.checkpoints import Manifest, checkpoint_name, checkpoints, newest, set_aside
from dynatrain.observe.run import RunFolder
from dynatrain.space.hf_config import ModelError
from dynatrain.space.presets import resolve_model

FREE = frozenset(
    {"layout", "steps", "device", "world", "switching", "switch", "blocks", "pipeline", "save", "loss", "validation"}
)
"""Settings that may change when a run goes on: none of them changes what is trained on what."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run that goes on.

    Attributes:
        run: its folder.
        config: resolved: in the layout that it goes on in.
        step: the next step.
        note: for people: from where, and what is wrong with newer checkpoints.
    """

    run: RunFolder
    config: RunConfig
    step: int
    note: str


def resume(config: RunConfig, path: Path, *, layout_named: bool) -> Resumed:
    """See what can be gone on with. Changes nothing.

    Args:
        config: as asked for now.
        path: of the run folder; a run is there.
        layout_named: whether the layout was asked for by name; else the run goes on in that of the checkpoint.

    Raises:
        MistakeError: settings that cannot change, no checkpoint that can be used, or fewer steps than were trained.
    """
    run = RunFolder.open(path)
    before, config = _scheduled(load_own(run.path).config, config, trained=_trained(run))
    config = _as_before(before, config, run)
    folder, problems = newest(run.checkpoints, by_hash=True)
    wrong = "".join(f"\n  - {problem}" for problem in problems)
    if folder is None:
        raise MistakeError(
            f"There is a run at {path} and no checkpoint that it could go on from.{wrong}\n"
            f"Give a new name, for example --run {path.name}-2; [save] every = N saves every N steps."
        )
    manifest = Manifest.read(folder)
    if config.steps < manifest.step:
        raise MistakeError(f"Run {run.name} has trained {manifest.step} steps; steps = {config.steps} is fewer.")
    # What was imported is in no layout yet.
    layout = config.layout if layout_named or manifest.weights_only else manifest.layout
    note = f"going on from step {manifest.step} ({folder}), {_origin(manifest)}, in {layout}"
    note += f"; newer ones cannot be used:{wrong}" if problems else ""
    if config.optimizer.decay_steps != config.steps:
        note += (
            f"\nthe cosine of the learning rate ends at step {config.optimizer.decay_steps}, steps are {config.steps}"
        )
    to_come = tuple(switch for switch in config.switch if switch.step >= manifest.step)
    if passed := [str(switch.step) for switch in config.switch if switch.step < manifest.step]:
        note += f"\nscheduled switches that are past are left out: of step {', '.join(passed)}"
    config = config.model_copy(update={"layout": layout, "switch": to_come})
    return Resumed(run, config, manifest.step, note)


def take_up(run: RunFolder, layout: str) -> str:
    """Have a run's folder say that it goes on in ``layout``: for the agent that takes it over from one that was lost.

    From the newest checkpoint that is there whole, by the sizes of its files; from the beginning where there is none.
    Scheduled switches of other numbers of ranks are left out.

    Args:
        run: its folder.
        layout: as text, legal for the ranks that are left.

    Returns:
        A note for people.

    Raises:
        MistakeError: nothing can be written there.
    """
    config = load_own(run.path).config
    folder, _ = newest(run.checkpoints)
    step = Manifest.read(folder).step if folder is not None else 0
    size = parse_layout(layout).world_size
    ahead = [switch for switch in config.switch if switch.step >= step]
    kept = tuple(switch for switch in ahead if parse_layout(switch.layout).world_size == size)
    note = f"going on from step {step} ({folder or 'its beginning: nothing was saved'}), in {layout}"
    if left := [str(switch.step) for switch in ahead if switch not in kept]:
        note += f"; scheduled switches of other numbers of ranks are left out: of step {', '.join(left)}"
    world = config.world.model_copy(update={"size": size})
    config = config.model_copy(update={"layout": layout, "switch": kept, "world": world})
    with reopened(Resumed(run, config, step, note)):
        return note


@contextmanager
def reopened(resumed: Resumed) -> Iterator[None]:
    """Have the run's folder say what it is asked for now; where it cannot begin, what it said before.

    Newer checkpoints whose hashes do not hold are set aside, so that all ranks take the one that was found whole.

    For the run's agent: nobody else may write there.

    Raises:
        MistakeError: nothing can be written there.
    """
    path = resumed.run.config
    before = path.read_text(encoding="utf-8")
    try:
        set_aside(resumed.run.checkpoints, resumed.step)
        write_atomically(path, own_toml(resumed.config, resumed.run.path))
    except OSError as error:
        raise MistakeError(f"{path} cannot be written: {error.strerror or error}.") from None
    try:
        yield
    except ValueError:
        write_atomically(path, before)
        raise


def _trained(run: RunFolder) -> bool:
    """Whether a step of the run was saved; what was imported is of step 0."""
    return any(path.name != checkpoint_name(0) for path in checkpoints(run.checkpoints))


def _scheduled(old: RunConfig, new: RunConfig, *, trained: bool) -> tuple[RunConfig, RunConfig]:
    """Both configurations with the end of the cosine that binds: that of the run's begin.

    Of a run that has not trained a step the begin is now: where the end was left to ``steps``, it follows these.
    """
    began = old.steps if old.optimizer.decay_steps is None else old.optimizer.decay_steps
    asked = new.optimizer.decay_steps
    if not trained and asked not in (None, began):
        began = asked
    elif not trained and began == old.steps:
        began = asked = new.steps
    old, new = (
        config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"decay_steps": steps})})
        for config, steps in ((old, began), (new, asked))
    )
    return old, new


def _origin(manifest: Manifest) -> str:
    return "weights only" if manifest.weights_only else f"saved in {manifest.layout}"


def _same_model(old: RunConfig, new: RunConfig) -> bool:
    """Whether both describe one model, wherever the description lies: an imported run has a copy of its own."""
    try:
        return resolve_model(old.model.config) == resolve_model(new.model.config)
    except ModelError:
        return False  # told as the two texts that differ, or by whoever needs the model


def _as_before(old: RunConfig, new: RunConfig, run: RunFolder) -> RunConfig:
    """``new``, with what it leaves open as it was resolved at the run's begin.

    Raises:
        MistakeError: with every setting that is not what it was and has to be.
    """
    if _same_model(old, new):
        new = new.model_copy(update={"model": new.model.model_copy(update={"config": old.model.config})})
    problems = []
    for section in RunConfig.model_fields.keys() - FREE:
        before, after = getattr(old, section), getattr(new, section)
        if isinstance(before, Section):
            kept = {key: value for key, value in before if getattr(after, key) is None}
            after = after.model_copy(update=kept)
            new = new.model_copy(update={section: after})
            changed = [(f"{section}.{key}", value, getattr(after, key)) for key, value in before]
        else:
            changed = [(section, before, after)]
        problems += [f"{name} was {was!r} and is now {now!r}" for name, was, now in changed if was != now]
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in sorted(problems))
        raise MistakeError(
            f"Run {run.name} cannot go on with other settings than it was begun with:{listed}\n"
            f"Keep them, or give a new name. What may change: {', '.join(sorted(FREE))}."
        )
    return new
