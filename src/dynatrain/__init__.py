"""dynatrain: train language models whose parallel layout changes while training runs."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_FACES = {
    "Switcher": "dynatrain.train.switcher",
    "stand_ins": "dynatrain.train.stand_ins",
    "Saves": "dynatrain.train.saving",
    "Promise": "dynatrain.execute.promise",
    "EngineTarget": "dynatrain.train.publisher",
    "PublishError": "dynatrain.train.publishing",
    "RunHandle": "dynatrain.app.handle",
    "RunAgent": "dynatrain.app.held",
}
"""What programs import from here, and where it lives; imported on first use: the package itself stays free of torch."""


def __getattr__(name: str) -> Any:
    """``dynatrain.Switcher`` and its like."""
    if name in _FACES:
        return getattr(import_module(_FACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
