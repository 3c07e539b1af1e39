"""Going on with a run: what may be other than it was, from which checkpoint, and in which layout."""

from dataclasses import dataclass
from pathlib import Path

from dynatrain.app.mistake import MistakeError
from dynatrain.config.load import load_config
from dynatrain.config.run import RunConfig, Section
from dynatrain.config.toml import to_toml
from dynatrain.observe.atomic import write_atomically
from dynatrain.observe.checkpoints import Manifest, newest
from dynatrain.observe.run import RunFolder

FREE = frozenset({"layout", "steps", "device", "world", "switching", "switch", "pipeline", "save", "validation"})
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
    config = _as_before(load_config(run.config, []).config, config, run)
    folder, problems = newest(run.checkpoints)
    wrong = "".join(f"\n  - {problem}" for problem in problems)
    if folder is None:
        raise MistakeError(
            f"There is a run at {path} and no checkpoint that it could go on from.{wrong}\n"
            f"Give a new name, for example --run {path.name}-2; [save] every = N saves every N steps."
        )
    manifest = Manifest.read(folder)
    if config.steps < manifest.step:
        raise MistakeError(f"Run {run.name} has trained {manifest.step} steps; steps = {config.steps} is fewer.")
    layout = config.layout if layout_named else manifest.layout
    note = f"going on from step {manifest.step} ({folder}), saved in {manifest.layout}, in {layout}"
    skipped = f"; newer ones cannot be used:{wrong}" if problems else ""
    return Resumed(run, config.model_copy(update={"layout": layout}), manifest.step, note + skipped)


def reopen(resumed: Resumed) -> None:
    """Write down what the run is asked for now."""
    write_atomically(resumed.run.config, to_toml(resumed.config))


def _as_before(old: RunConfig, new: RunConfig, run: RunFolder) -> RunConfig:
    """``new``, with what it leaves open as it was resolved at the run's begin.

    Raises:
        MistakeError: with every setting that is not what it was and has to be.
    """
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
