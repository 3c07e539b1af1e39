"""Starting a run: from a configuration to a folder, its data, and an agent in this process. For train and demo."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dynatrain.app.mistake import MistakeError, all_of, is_mistake
from dynatrain.app.prints import prints_of
from dynatrain.app.progress import watch
from dynatrain.app.resize import layout_of_size
from dynatrain.app.resume import Resumed, reopened, resume, take_up
from dynatrain.cluster.launch import run_agent
from dynatrain.cluster.place import place_from, share
from dynatrain.config.own import OWN_MODEL, own_toml
from dynatrain.config.run import RunConfig
from dynatrain.data.corpus import DataError, already_tokenised
from dynatrain.data.prepare import Request, open_samples, open_validation, prepare
from dynatrain.data.tokenizer import copy_tokenizer, load_tokenizer, vocabulary
from dynatrain.layout.text import print_layout
from dynatrain.observe.atomic import passing_parents
from dynatrain.observe.draft import discard
from dynatrain.observe.paths import exists, user_path
from dynatrain.observe.run import RunFolder
from dynatrain.observe.versions import environment, require_tested, versions
from dynatrain.space.decoder import DecoderShape
from dynatrain.space.presets import PRESETS
from dynatrain.space.run_check import CheckedRun, check_run, tokenizer_of

ENTRY = "dynatrain.train.rank:main"
"""What each rank runs."""
LOOP_ENTRY = "dynatrain.train.own_loop:entry"
"""What makes that of a loop of the user's own."""


def start(
    config: RunConfig,
    path: Path,
    *,
    quiet: bool = False,
    entry: str = ENTRY,
    fresh: bool = True,
    layout_named: bool = False,
    take_over: bool = False,
) -> tuple[RunFolder | None, int]:
    """Make a run, or go on with one, and train until it ends.

    Under ``torchrun`` the first node makes the run and shows its progress; the others find it under the same path once
    the agents have met.

    Args:
        config: what was asked for.
        path: of the run folder.
        quiet: print nothing for people on standard output.
        entry: ``package.module:function`` that each rank runs.
        fresh: nothing may be at ``path``; else a run that is there goes on from its newest checkpoint.
        layout_named: whether a run that goes on does so in the configuration's layout, not in that of its checkpoint.
        take_over: go on with a run also where an agent on another host may still drive it.

    Returns:
        The run, on the node that is to speak of it, and the exit code.

    Raises:
        ValueError: the user's mistake, of the kind that found it. Nothing is left behind.
    """
    config = anywhere(config)
    there = _node() == 0 and RunFolder(path).exists
    if there and fresh:
        raise MistakeError(
            f"There is a run at {path} already. Give a new name, for example --run {path.name}-2; or let train go on "
            "with it, without --fresh."
        )
    resumed = resume(config, path, layout_named=layout_named) if there else None
    config = resumed.config if resumed else config
    place, checked, _ = all_of(
        lambda: place_from(os.environ, config.world.interface),
        lambda: check_run(config),
        lambda: require_tested(versions()),
    )
    size = checked.layout.world_size
    if place.node == 0:  # whose number of ranks counts
        share(size, place)
    agent = partial(
        run_agent,
        entry=entry_of(config, entry),
        world_size=size,
        device=config.device,
        grace_seconds=grace_of(config),
        drain_seconds=config.world.grace,
        spares=config.world.spares,
        interface=config.world.interface,
        prints=prints_of(checked),
        layout=print_layout(checked.layout),
        resize=partial(layout_of_size, checked),
        survives=True,
        replacements=config.loss.replacements,
        take_up=take_up,
    )
    if place.node > 0:
        return None, agent(RunFolder(path.absolute()))
    if resumed:
        return resumed.run, _go_on(
            resumed, checked, partial(agent, take_over=take_over), nodes=place.nodes, quiet=quiet
        )
    with passing_parents(path):
        run = make(checked, path)
        with _taken_back(run), watch(run, config.steps, quiet=quiet) as announce:
            for note in (*checked.notes, *_advice(config, place.nodes)):
                announce(note)
            return run, agent(run, announce=announce)


def _go_on(resumed: Resumed, checked: CheckedRun, agent: Callable[..., int], *, nodes: int, quiet: bool) -> int:
    """Train on; the exit code."""
    steps = resumed.config.steps
    with watch(resumed.run, steps, quiet=quiet) as announce:
        for note in (resumed.note, *checked.notes, *_advice(resumed.config, nodes)):
            announce(note)
        if resumed.step == steps:
            announce(f"all {steps} steps are trained already; more with --steps=N")
            return 0
        return agent(resumed.run, asked=reopened(resumed), announce=announce)


def _advice(config: RunConfig, nodes: int) -> tuple[str, ...]:
    """What is well to know at the start on several hosts."""
    if nodes == 1 or config.save.every:
        return ()
    return ("[save] every = 0: should the agent that leads be lost, the others go on from the last save, or anew",)


def entry_of(config: RunConfig, entry: str) -> str:
    """What each rank of a run runs: ``entry``, or the loop that the configuration names."""
    return f"{LOOP_ENTRY} {config.loop}" if config.loop else entry


def grace_of(config: RunConfig) -> float:
    """Seconds that ranks have after SIGTERM."""
    return config.save.grace_seconds if config.save.at_end else 0.0


def anywhere(config: RunConfig) -> RunConfig:
    """The configuration with paths that mean the same in every working directory."""
    model, data = config.model, config.data
    if model.config not in PRESETS and exists(user_path(model.config)):
        model = model.model_copy(update={"config": str(user_path(model.config).absolute())})
    paths = tuple(str(user_path(path).absolute()) for path in data.paths)
    path, colon, name = config.loop.rpartition(":")
    loop = f"{user_path(path).absolute()}:{name}" if colon else config.loop
    return config.model_copy(update={"model": model, "data": data.model_copy(update={"paths": paths}), "loop": loop})


def refuse_unnamed(name: str, environment: Mapping[str, str]) -> None:
    """Refuse a launch of several agents that would each think of a name of their own.

    Raises:
        MistakeError: the run has no name.
    """
    if not name and place_from(environment).nodes > 1:
        raise MistakeError("Several nodes, and no --run NAME: each would name the run by its own clock. Give one name.")


def _node() -> int:
    try:
        return place_from(os.environ).node
    except ValueError:
        return 0  # the launch is refused by itself


def make(
    checked: CheckedRun,
    path: Path,
    *,
    model: Path | None = None,
    then: Callable[[RunFolder], None] = lambda _: None,
) -> RunFolder:
    """The folder with everything that ranks need; nothing where the data cannot be used, or somebody interrupts.

    Args:
        checked: what was asked for.
        path: of the folder.
        model: a ``config.json`` that the run is to have a copy of, so that it needs no other folder.
        then: writes more into the folder, before it has its name.
    """
    config = checked.config
    tokenizer = None if config.loop else tokenizer_for(config, checked.shape)
    if model is not None:
        own = config.model.model_copy(update={"config": str(path.absolute() / OWN_MODEL)})
        config = config.model_copy(update={"model": own})
    request = Request(
        paths=config.data.paths,
        text_column=config.data.text_column,
        tokenizer=config.data.tokenizer,
        vocab_size=checked.shape.vocab_size if already_tokenised(config.data.paths) else config.data.vocab_size,
        validation=config.data.validation,
        seed=config.seed,
    )

    def fill(run: RunFolder) -> None:
        if model is not None:
            shutil.copyfile(model, run.path / OWN_MODEL)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, run.path)
        if not config.loop:  # whose data are its own
            prepare(request, run.path)
            open_samples(run.path, config.data.sequence)
            if config.validation.every:
                open_validation(run.path, config.data.sequence)
        then(run)

    return RunFolder.create(path, config=own_toml(config, path), environment=environment(), fill=fill)


def tokenizer_for(config: RunConfig, shape: DecoderShape) -> Path | None:
    """The ``tokenizer.json`` that a new run takes from its model; None where it makes one.

    Raises:
        DataError: it cannot be used, or has more tokens than the model knows.
    """
    if config.data.tokenizer != "model":
        return None
    path = tokenizer_of(config)
    tokens = vocabulary(load_tokenizer(path))
    if tokens > shape.vocab_size:
        rule = f"{path} has tokens up to number {tokens - 1}; all below the model's vocabulary, {shape.vocab_size}"
        raise DataError("the tokenizer does not fit the model", (f"{rule}; or --data.tokenizer=bpe, or bytes",))
    return path


@contextmanager
def _taken_back(run: RunFolder) -> Iterator[None]:
    """Take the run away again where its agent refuses to begin: no rank was started then, and nothing is lost."""
    try:
        yield
    except ValueError as error:
        mark = run.agent()
        ours = mark is None or (mark.pid, mark.host) == (os.getpid(), socket.gethostname())
        if is_mistake(error) and ours and not any(run.logs.glob("rank_*")):
            discard(run.path)
        raise
