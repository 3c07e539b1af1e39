"""From the words after a command's name to the call of its function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import tyro

Text = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="LAYOUT")]
"""A layout, given by its place."""
Run = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
"""A run, given by its place."""
Checkpointed = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
"""A run or one of its checkpoints, given by its place."""
Step = Annotated[int, tyro.conf.arg(metavar="N")]
"""A step; -1 for the newest."""
Rank = Annotated[int | None, tyro.conf.arg(metavar="R")]
"""A rank; None for all."""


def split(words: Sequence[str], own: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Part a line into the command's own words and the settings of a run, each with its values.

    Args:
        words: of the line.
        own: the command's own options, and whether a value follows; every other one is a setting.
    """
    mine: list[str] = []
    settings: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, mark, _ = word.partition("=")
        ours = not word.startswith("--") or key in own
        (mine if ours else settings).append(word)
        takes_value = own.get(key, True) and not mark and word.startswith("--")
        if takes_value and rest and not rest[0].startswith("--"):
            (mine if ours else settings).append(rest.pop(0))
    return mine, settings


def call(command: Callable[..., int], words: Sequence[str]) -> int:
    """Call ``command`` with the arguments that ``words`` spell; its docstring is the help.

    Ends the process with code 2 where they cannot be read, and with 0 where they ask for help.
    """
    name = command.__name__.rstrip("_").replace("_", "-")  # import_ is the function of import
    return tyro.cli(command, args=words, prog=f"dynatrain {name}", config=(tyro.conf.FlagCreatePairsOff,))
