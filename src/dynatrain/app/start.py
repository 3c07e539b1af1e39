"""Starting a run: from a configuration to a folder, its data, and an agent in this process. For train and demo."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dynatrain.app.mistake import MistakeError, all_of, is_mistake
from dynatrain.app.progress import watch
from dynatrain.cluster.launch import run_agent
from dynatrain.cluster.place import place_from, share
from dynatrain.config.run import RunConfig
from dynatrain.config.toml import to_toml
from dynatrain.data.corpus import already_tokenised
from dynatrain.data.prepare import Request, open_samples, open_validation, prepare
from dynatrain.observe.atomic import passing_parents
from dynatrain.observe.run import RunFolder
from dynatrain.observe.versions import environment, require_tested, versions
from dynatrain.space.presets import PRESETS
from dynatrain.space.run_check import CheckedRun, check_run

ENTRY = "dynatrain.train.rank:main"
"""What each rank runs."""


def start(config: RunConfig, path: Path, *, quiet: bool = False, entry: str = ENTRY) -> tuple[RunFolder | None, int]:
    """Make a run, and train until it ends.

    Under ``torchrun`` the first node makes the run and shows its progress; the others find it under the same path once
    the agents have met.

    Args:
        config: what was asked for.
        path: of the run folder; nothing may be there.
        quiet: print nothing for people on standard output.
        entry: ``package.module:function`` that each rank runs.

    Returns:
        The run, on the node that is to speak of it, and the exit code.

    Raises:
        ValueError: the user's mistake, of the kind that found it. Nothing is left behind.
    """
    config = _anywhere(config)
    place, checked, _, _ = all_of(
        lambda: place_from(os.environ),
        lambda: check_run(config),
        lambda: require_tested(versions()),
        lambda: _refuse_existing(path),
    )
    size, device = checked.layout.world_size, checked.config.device
    share(size, place)
    if place.node > 0:
        return None, run_agent(RunFolder(path.absolute()), entry, size, device)
    with passing_parents(path):
        run = _make(checked, path)
        with _taken_back(run), watch(run, checked.config.steps, quiet=quiet) as announce:
            return run, run_agent(run, entry, size, device, announce=announce)


def _anywhere(config: RunConfig) -> RunConfig:
    """The configuration with paths that mean the same in every working directory."""
    model, data = config.model, config.data
    if model.config not in PRESETS and Path(model.config).expanduser().exists():
        model = model.model_copy(update={"config": str(Path(model.config).expanduser().absolute())})
    paths = tuple(str(Path(path).expanduser().absolute()) for path in data.paths)
    return config.model_copy(update={"model": model, "data": data.model_copy(update={"paths": paths})})


def refuse_unnamed(name: str, environment: Mapping[str, str]) -> None:
    """Refuse a launch of several agents that would each think of a name of their own.

    Raises:
        MistakeError: the run has no name.
    """
    if not name and place_from(environment).nodes > 1:
        raise MistakeError("Several nodes, and no --run NAME: each would name the run by its own clock. Give one name.")


def _refuse_existing(path: Path) -> None:
    if RunFolder(path).exists and _node() == 0:
        raise MistakeError(
            f"There is a run at {path} already, and this version cannot go on with one: resume comes with checkpoints. "
            f"Give a new name, for example --run {path.name}-2."
        )


def _node() -> int:
    try:
        return place_from(os.environ).node
    except ValueError:
        return 0  # the launch is refused by itself


def _make(checked: CheckedRun, path: Path) -> RunFolder:
    """The folder with everything that ranks need; nothing where the data cannot be used, or somebody interrupts."""
    config = checked.config
    run = RunFolder.create(path, config=to_toml(config), environment=environment())
    request = Request(
        paths=config.data.paths,
        text_column=config.data.text_column,
        tokenizer=config.data.tokenizer,
        vocab_size=checked.shape.vocab_size if already_tokenised(config.data.paths) else config.data.vocab_size,
        validation=config.data.validation,
        seed=config.seed,
    )
    try:
        prepare(request, run.path)
        open_samples(run.path, config.data.sequence)
        if config.validation.every:
            open_validation(run.path, config.data.sequence)
    except BaseException:
        shutil.rmtree(run.path)
        raise
    return run


@contextmanager
def _taken_back(run: RunFolder) -> Iterator[None]:
    """Take the run away again where the agent refuses to begin: no rank was started then, and nothing is lost."""
    try:
        yield
    except ValueError as error:
        if is_mistake(error) and not any(run.logs.glob("rank_*")):
            shutil.rmtree(run.path)
        raise
