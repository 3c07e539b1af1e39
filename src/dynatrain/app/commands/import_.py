"""``dynatrain import DIR RUN``."""

from pathlib import Path
from typing import Annotated

import tyro

from dynatrain.app.cli import call, split
from dynatrain.app.imports import import_run
from dynatrain.app.output import emit, say
from dynatrain.app.runs import run_path
from dynatrain.config.own import TOKENIZER
from dynatrain.observe.run import RUNS

Source = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Config = Annotated[Path | None, tyro.conf.arg(metavar="CONFIG.toml")]

_OWN = {"--config": True, "--json": False, "--help": False}


def run(words: list[str]) -> int:
    """The command: its own words go to its function, the settings to the configuration."""
    own, settings = split(words, _OWN)

    def import_(source: Source, run: Name, /, *, config: Config = None, json: bool = False) -> int:
        """Make a new run out of a Hugging Face folder: its model, its tokenizer and its weights, as step 0.

        Any setting of train can be given: --layout fsdp4 --steps=500 --data.paths=['text'], or a file with --config.
        The run has copies of all it needs. Train it with dynatrain train --run RUN: the optimizer begins anew.

        Exit codes: 0 made; 2 something to correct, nothing was written.

        Args:
            source: the folder: config.json, model.safetensors or its shards, and a tokenizer.json where it has one.
            run: name of the new run (a folder under runs/), or the path of its folder.
            config: a TOML file of settings, as for train.
            json: print one JSON object.
        """
        made = import_run(config, settings, source, run_path(run, RUNS))
        if json:
            about = {"run": str(made.run.path), "checkpoint": str(made.checkpoint)}
            emit({**about, "tokenizer": made.tokenizer, "states": ["param"]})
            return 0
        name = made.run.name if made.run.path.parent.name == RUNS.name else made.run.path
        if made.tokenizer != "model":
            say(f"note: not with a tokenizer of {source} but with {made.tokenizer}: {source / TOKENIZER} is not used")
        say(f"{made.checkpoint}: the weights of {source}", f"train it:  dynatrain train --run {name}")
        return 0

    return call(import_, own)
