"""From the words after a command's name to the call of its function."""

from collections.abc import Callable, Sequence
from typing import Annotated

import tyro

Text = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="LAYOUT")]
"""A layout, given by its place."""
Run = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
"""A run, given by its place."""
Rank = Annotated[int, tyro.conf.arg(metavar="R")]
"""A rank; -1 for all."""

ALL_RANKS = -1


def call(command: Callable[..., int], words: Sequence[str]) -> int:
    """Call ``command`` with the arguments that ``words`` spell; its docstring is the help.

    Ends the process with code 2 where they cannot be read, and with 0 where they ask for help.
    """
    name = command.__name__.replace("_", "-")
    return tyro.cli(command, args=words, prog=f"dynatrain {name}", config=(tyro.conf.FlagCreatePairsOff,))
