"""``dynatrain train CONFIG.toml [--a.b=c ...]``."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro

from dynatrain.app.cli import call, split
from dynatrain.app.mistake import MistakeError, all_of
from dynatrain.app.runs import find_run, run_path
from dynatrain.app.start import refuse_unnamed, start
from dynatrain.app.summary import conclude
from dynatrain.config.load import Loaded, load_config
from dynatrain.config.own import load_own
from dynatrain.observe.checkpoints import checkpoints
from dynatrain.observe.run import RUNS

Config = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG.toml")]
Name = Annotated[str, tyro.conf.arg(metavar="NAME")]

_OWN = {"--run": True, "--fresh": False, "--take-over": False, "--json": False, "--help": False}
"""The command's own options, and whether a value follows; every other one is a setting."""


def run(words: list[str]) -> int:
    """The command: its own words go to its function, the settings to the configuration."""
    own, settings = split(words, _OWN)

    def train(
        config: Config = None,
        /,
        *,
        run: Name | None = None,
        fresh: bool = False,
        take_over: bool = False,
        json: bool = False,
    ) -> int:
        """Train as a TOML file says.

        Any setting can be changed on the line: --steps=500 --layout fsdp4 --optimizer.lr=1e-3. All that is not set has
        a default; the run's folder holds the whole in config.toml.

        A run that is there already goes on from its newest checkpoint, in the layout of that or in --layout=..., on as
        many ranks as that has: dynatrain train --run NAME, without the file, takes its settings from its folder.

        On several nodes, on each: torchrun --nproc-per-node=1 ... -m -- dynatrain train CONFIG.toml --run NAME. Without
        the two dashes torchrun takes --run for an option of its own. The run's folder has to be on a shared disk.

        Exit codes: 0 trained to the end; 2 something to correct, nothing was started; 3 the run failed; 75 stopped and
        saved, the same command with --run NAME goes on; 130 Ctrl-C; 143 SIGTERM with nothing saved.

        Args:
            config: the file; needed for a new run.
            run: name of the run (a folder under runs/), or the path of its folder; by default file name and time.
            fresh: never go on with a run that is there already.
            take_over: go on with a run whose agent on another host was killed less than a minute ago, and so seems to
                live; if it does live, it ends.
            json: print one JSON object at the end, and progress on standard error.
        """
        if run == "":
            raise MistakeError("--run is empty, as where a variable has no value; give a name, or leave --run out.")
        if config is None:
            name, loaded = _as_it_was(run or "", settings)
        else:
            loaded, _ = all_of(lambda: load_config(config, settings), lambda: refuse_unnamed(run or "", os.environ))
            name = run or f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        named = loaded.origins["layout"] == "flag"
        path = run_path(name, RUNS)
        folder, code = start(loaded.config, path, quiet=json, fresh=fresh, layout_named=named, take_over=take_over)
        return conclude(folder, code, json=json)

    return call(train, own)


def _as_it_was(name: str, settings: list[str]) -> tuple[str, Loaded]:
    """The path of a run that is there, and its configuration, in which the layout decides on the number of ranks.

    Raises:
        MistakeError: no run is named, or it has nothing to go on from.
        RunError: no such run is there.
        ConfigError: what is wrong with the settings.
    """
    if not name:
        raise MistakeError("A new run needs a CONFIG.toml; dynatrain train --run NAME goes on with one that is there.")
    run = find_run(name)
    if not checkpoints(run.checkpoints):
        raise MistakeError(
            f"Run {run.name} has no checkpoint that it could go on from. Train it anew from its CONFIG.toml, for "
            f"example with --run {run.name}-2."
        )
    loaded = load_own(run.path, settings)
    if loaded.origins["world.size"] != "flag":
        world = loaded.config.world.model_copy(update={"size": None})
        loaded = replace(loaded, config=loaded.config.model_copy(update={"world": world}))
    return str(run.path), loaded
