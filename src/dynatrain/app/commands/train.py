"""``dynatrain train CONFIG.toml [--a.b=c ...]``."""

import os
import time
from pathlib import Path
from typing import Annotated

import tyro

from dynatrain.app.cli import call
from dynatrain.app.mistake import all_of
from dynatrain.app.runs import run_path
from dynatrain.app.start import refuse_unnamed, start
from dynatrain.app.summary import conclude
from dynatrain.config.load import load_config
from dynatrain.observe.run import RUNS

Config = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG.toml")]
Name = Annotated[str, tyro.conf.arg(metavar="NAME")]

_OWN = {"--run": True, "--fresh": False, "--json": False, "--help": False}
"""The command's own options, and whether a value follows; every other one is a setting."""


def run(words: list[str]) -> int:
    """The command: its own words go to its function, the settings to the configuration."""
    own, settings = _split(words)

    def train(config: Config, /, *, run: Name = "", fresh: bool = False, json: bool = False) -> int:
        """Train as a TOML file says.

        Any setting can be changed on the line: --steps=500 --layout fsdp4 --optimizer.lr=1e-3. All that is not set has
        a default; the run's folder holds the whole in config.toml.

        A run that is there already goes on from its newest checkpoint, in the layout of that or in --layout=..., on as
        many ranks as that has.

        On several nodes, on each: torchrun --nproc-per-node=1 ... -m -- dynatrain train CONFIG.toml --run NAME. Without
        the two dashes torchrun takes --run for an option of its own. The run's folder has to be on a shared disk.

        Exit codes: 0 trained to the end; 2 something to correct, nothing was started; 3 the run failed; 75 stopped and
        saved, the same command goes on; 130 Ctrl-C; 143 SIGTERM with nothing saved.

        Args:
            config: the file.
            run: name of the run (a folder under runs/), or the path of its folder; by default file name and time.
            fresh: never go on with a run that is there already.
            json: print one JSON object at the end, and progress on standard error.
        """
        loaded, _ = all_of(lambda: load_config(config, settings), lambda: refuse_unnamed(run, os.environ))
        name = run or f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        named = loaded.origins["layout"] == "flag"
        folder, code = start(loaded.config, run_path(name, RUNS), quiet=json, fresh=fresh, layout_named=named)
        return conclude(folder, code, json=json)

    return call(train, own)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The command's own words, and the settings with their values."""
    own: list[str] = []
    settings: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, mark, _ = word.partition("=")
        mine = not word.startswith("--") or key in _OWN
        (own if mine else settings).append(word)
        takes_value = _OWN.get(key, True) and not mark and word.startswith("--")
        if takes_value and rest and not rest[0].startswith("--"):
            (own if mine else settings).append(rest.pop(0))
    return own, settings
