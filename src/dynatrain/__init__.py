"""dynatrain: train language models whose parallel layout changes while training runs."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``dynatrain.Switcher``, imported on first use: the package itself stays free of torch."""
    if name == "Switcher":
        from dynatrain.train.switcher import Switcher  # noqa: PLC0415

        return Switcher
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
