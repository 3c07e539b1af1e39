"""``dynatrain demo``."""

import time
from importlib import resources

from dynatrain.app.cli import call
from dynatrain.app.output import say
from dynatrain.app.runs import run_path
from dynatrain.app.start import start
from dynatrain.app.summary import conclude
from dynatrain.config.load import load_config
from dynatrain.observe.run import RUNS


def run(words: list[str]) -> int:
    """The command."""
    return call(demo, words)


def demo(*, run: str = "", json: bool = False) -> int:
    """Train a small model on four CPU ranks while its layout changes eight times. Takes no data and no configuration.

    The text is the Python standard library of this machine. Ends with a table of the switches and the loss.

    Args:
        run: name of the run, or the path of its folder; by default demo- and the time.
        json: print one JSON object at the end, and progress on standard error.
    """
    with resources.as_file(resources.files("dynatrain.app") / "demo.toml") as path:
        config = load_config(path, []).config
    if not json:
        layouts = " -> ".join((config.layout, *(switch.layout for switch in config.switch)))
        say(f"{config.model.config} on four ranks, {config.steps} steps: {layouts}")
    folder, code = start(config, run_path(run or f"demo-{time.strftime('%Y%m%d-%H%M%S')}", RUNS), quiet=json)
    return conclude(folder, code, json=json)
