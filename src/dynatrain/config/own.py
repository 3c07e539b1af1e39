"""The configuration in a run's folder: what was asked for, resolved, and still right where the folder is moved."""

from pathlib import Path

from dynatrain.config.load import Loaded, load_config
from dynatrain.config.run import RunConfig
from dynatrain.config.toml import to_toml

CONFIG = "config.toml"
OWN_MODEL = "config.json"
"""The description of the model, where a run's folder has it; in the configuration ``./config.json``."""
TOKENIZER = "tokenizer.json"
"""Beside a model's description, and in a run's folder."""
_WRITTEN = f"./{OWN_MODEL}"


def load_own(folder: Path, overrides: list[str] | None = None) -> Loaded:
    """The configuration of the run in ``folder``.

    Args:
        folder: of the run.
        overrides: flags, as of :func:`load_config`.

    Raises:
        ConfigError: its ``config.toml`` was damaged, or is of another version; or what is wrong with the flags.
    """
    loaded = load_config(folder / CONFIG, overrides or [])
    model = loaded.config.model
    if model.config != _WRITTEN:
        return loaded
    model = model.model_copy(update={"config": str(folder.absolute() / OWN_MODEL)})
    return Loaded(config=loaded.config.model_copy(update={"model": model}), origins=loaded.origins)


def own_toml(config: RunConfig, folder: Path) -> str:
    """The text of ``config.toml`` in ``folder``; :func:`load_own` reads an equal value back."""
    if config.model.config == str(folder.absolute() / OWN_MODEL):
        config = config.model_copy(update={"model": config.model.model_copy(update={"config": _WRITTEN})})
    return to_toml(config)
