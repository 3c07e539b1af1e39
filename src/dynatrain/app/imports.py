"""A new run out of a Hugging Face folder: its model, its tokenizer where it has one, and its weights as step 0."""

from dataclasses import dataclass
from pathlib import Path

from dynatrain.app.mistake import MistakeError, all_of
from dynatrain.app.start import anywhere, make, tokenizer_for
from dynatrain.config.load import Loaded, load_config
from dynatrain.config.own import OWN_MODEL, TOKENIZER
from dynatrain.config.run import RunConfig
from dynatrain.observe.checkpoints import checkpoint_name
from dynatrain.observe.run import RunFolder
from dynatrain.observe.versions import require_tested, versions
from dynatrain.space.decoder import DecoderShape
from dynatrain.space.run_check import CheckedRun, check_run


@dataclass(frozen=True, slots=True)
class Imported:
    """A run that was made.

    Attributes:
        run: its folder.
        checkpoint: the weights.
        tokenizer: in the words of the configuration.
    """

    run: RunFolder
    checkpoint: Path
    tokenizer: str


def import_run(toml: Path | None, settings: list[str], source: Path, path: Path) -> Imported:
    """Make a run of a folder's model and weights.

    Args:
        toml: a file of settings; None for none.
        settings: flags, as of :func:`load_config`.
        source: the folder; it may go once this has returned.
        path: of the run folder.

    Raises:
        ValueError: the user's mistake, of the kind that found it. Nothing is left behind.
    """
    run = RunFolder(path.absolute())
    loaded, *_ = all_of(lambda: _open_settings(toml, settings), lambda: _require_folder(source), run.require_free)
    shape = DecoderShape.read_config(source)
    config = anywhere(_of_source(loaded, source.absolute()))
    from dynatrain.execute.hf_folder import open_folder  # noqa: PLC0415 - torch, which a mistake need not wait for

    checked, *_ = all_of(
        lambda: check_run(config),
        lambda: open_folder(source, shape),
        lambda: tokenizer_for(config, shape),
        lambda: require_tested(versions()),
    )
    checkpoint = _write(checked, source, run)
    return Imported(run, checkpoint, config.data.tokenizer)


def _write(checked: CheckedRun, source: Path, run: RunFolder) -> Path:
    """Make the run's folder, with its first checkpoint in it."""
    from dynatrain.train.parallel import master_dtype  # noqa: PLC0415 - torch
    from dynatrain.train.weights import import_weights  # noqa: PLC0415

    dtype = master_dtype(checked.config.precision.compute)

    def weights(draft: RunFolder) -> None:
        try:
            import_weights(source, checked.shape, draft.checkpoints, run_id=run.name, dtype=dtype)
        except OSError as error:
            raise MistakeError(
                f"The run {run.path} cannot be written: {error.strerror or error}. Four bytes are needed for each "
                "parameter, eight with precision.compute = 'fp64'."
            ) from None

    make(checked, run.path, model=source / OWN_MODEL, then=weights)
    return run.checkpoints / checkpoint_name(0)


def _of_source(loaded: Loaded, source: Path) -> RunConfig:
    """The settings, with the model of the folder, and its tokenizer where it has one and no other was asked for."""
    model = loaded.config.model.model_copy(update={"config": str(source)})
    data = loaded.config.data
    if loaded.origins["data.tokenizer"] == "default" and (source / TOKENIZER).is_file():
        data = data.model_copy(update={"tokenizer": "model"})
    return loaded.config.model_copy(update={"model": model, "data": data})


def _require_folder(source: Path) -> None:
    if not (source / OWN_MODEL).is_file():
        seen = "has no config.json" if source.is_dir() else "is no folder"
        raise MistakeError(f"{source} {seen}; import takes a folder with config.json and model.safetensors or shards.")


def _open_settings(toml: Path | None, settings: list[str]) -> Loaded:
    """The settings, which leave the model open."""
    loaded = load_config(toml, settings)
    if (origin := loaded.origins["model.config"]) != "default":
        raise MistakeError(
            f"model.config ({origin}) is {loaded.config.model.config!r}; an import has DIR's. Leave it out."
        )
    return loaded
