"""Which checkpoint a command means: of a run that runs, one of now; else the newest that can be used, or one named."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynatrain.app.ask import ask
from dynatrain.app.mistake import MistakeError
from dynatrain.app.runs import config_of, find_run
from dynatrain.config.run import RunConfig
from dynatrain.observe.checkpoints import (
    CheckpointError,
    Manifest,
    checkpoint_name,
    checkpoints,
    named_step,
    newest,
    step_of,
    usable,
)
from dynatrain.observe.run import RunFolder
from dynatrain.space.decoder import DecoderShape
from dynatrain.space.presets import resolve_model
from dynatrain.space.run_check import with_dropout

NEWEST = -1
"""In the place of a step: the newest."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a command was asked for.

    Attributes:
        run: whose checkpoint.
        config: its configuration.
        shape: its model.
        step: of the checkpoint; :data:`NEWEST` where none was named.
    """

    run: RunFolder
    config: RunConfig
    shape: DecoderShape
    step: int

    @property
    def tokenizer(self) -> Path | None:
        """The run's tokenizer; None where its data were tokens already."""
        return self.run.tokenizer if self.run.tokenizer.is_file() else None


@dataclass(frozen=True, slots=True)
class Chosen:
    """A checkpoint that is there.

    Attributes:
        folder: of the checkpoint.
        manifest: what it is.
        note: for people: what was passed over; empty where nothing was.
    """

    folder: Path
    manifest: Manifest
    note: str


def wanted(text: str, step: int = NEWEST) -> Wanted:
    """The run that ``text`` names, or in whose folder the checkpoint lies that it names. Looks at no checkpoint.

    Raises:
        MistakeError, RunError, ConfigError, ModelError: no such run, or one whose model cannot be made out.
    """
    path = Path(text)
    of_path = named_step(path) if text and path.is_dir() else None
    if of_path is None:
        run = find_run(text)
    else:
        run = run_above(path)
        if step not in {NEWEST, of_path}:
            raise MistakeError(f"{path} is step {of_path}, and --step is {step}. Name the run, or leave --step out.")
        step = of_path
    config = config_of(run)
    if config.loop:
        raise MistakeError(
            f"Run {run.name} trains in a loop of its own, {config.loop}, which alone knows what its checkpoints hold. "
            "Have the loop write its weights, as recipes/hf_llama.py does."
        )
    shape = with_dropout(resolve_model(config.model.config, to_train=True), config.model)
    return Wanted(run, config, shape, step)


def run_above(checkpoint: Path) -> RunFolder:
    """The run in whose ``checkpoints/`` a checkpoint lies.

    Raises:
        MistakeError: no run is there.
    """
    run = RunFolder(checkpoint.absolute().parent.parent)
    if not run.exists:
        raise MistakeError(
            f"{checkpoint} does not lie in RUN/checkpoints/ of a run, whose config.toml says what model it is of; "
            f"{run.path} is no run. Nearest: name a run, with --step."
        )
    return run


def choose(asked: Wanted, timeout: float) -> Chosen:
    """The checkpoint that was asked for; a running run is asked to save first where no step was named.

    Args:
        asked: for what.
        timeout: seconds to wait for the save.

    Raises:
        MistakeError: it is not there, cannot be used, or was not saved; with the steps that are there.
    """
    run, root = asked.run, asked.run.checkpoints
    if asked.step != NEWEST:
        folder, problems = root / checkpoint_name(asked.step), ()
        if not folder.is_dir():
            raise MistakeError(f"Run {run.name} has no checkpoint of step {asked.step}. {_there(root)}")
    else:
        if _runs(run):
            _, answer = ask(run, "save", {}, timeout)
            if answer.outcome not in {"done", "unchanged"}:
                raise MistakeError(f"Run {run.name} could not be saved: {answer.message}. {_there(root)}")
        folder, problems = _newest(run)
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        raise MistakeError(f"{error}. {_there(root)}") from None
    note = "newer ones cannot be used: " + "; ".join(problems) if problems else ""
    return Chosen(folder, manifest, note)


def _newest(run: RunFolder) -> tuple[Path, tuple[str, ...]]:
    """The newest checkpoint that can be used, and what is wrong with those after it.

    Raises:
        MistakeError: there is none.
    """
    found, problems = newest(run.checkpoints)
    if found is None:
        wrong = "".join(f"\n  - {problem}" for problem in problems)
        raise MistakeError(
            f"Run {run.name} has no checkpoint that can be used.{wrong}\n"
            f"A running run makes one by dynatrain save {run.name}; [save] every = N by itself, every N steps."
        )
    return found, problems


@contextmanager
def kept(chosen: Chosen, asked: Wanted) -> Iterator[None]:
    """While a checkpoint is read: say by name what is wrong with it, and what could be taken instead.

    Raises:
        MistakeError: it is damaged, or the run has removed it meanwhile.
    """
    try:
        yield
    except FileNotFoundError:
        if chosen.folder.exists():
            raise
        raise MistakeError(
            f"{chosen.folder} was removed meanwhile by its run, which keeps the last {asked.config.save.keep_last} "
            f"([save] keep_last). {_there(asked.run.checkpoints)}"
        ) from None
    except CheckpointError as error:
        raise MistakeError(f"{error}\n{_there(asked.run.checkpoints, but=chosen.manifest.step)}") from None


def _runs(run: RunFolder) -> bool:
    return run.liveness() in {"alive", "elsewhere"}


def _there(root: Path, but: int = NEWEST) -> str:
    """What could be taken instead."""
    steps = [str(step_of(folder)) for folder in checkpoints(root) if step_of(folder) != but and usable(folder)]
    return f"There: --step {', '.join(steps)}." if steps else "There is no other that can be used."
