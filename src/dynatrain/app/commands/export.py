"""``dynatrain export RUN DIR``."""

import math
import re
from pathlib import Path
from typing import Annotated

import tyro

from dynatrain.app.chosen import NEWEST, choose, kept, wanted
from dynatrain.app.cli import Checkpointed, Step, call
from dynatrain.app.mistake import MistakeError, all_of
from dynatrain.app.output import emit, say, size
from dynatrain.observe.atomic import passing_parents

Place = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
Size = Annotated[str, tyro.conf.arg(metavar="SIZE")]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def run(words: list[str]) -> int:
    """The command."""
    return call(export, words)


def export(
    run: Checkpointed,
    to: Place,
    /,
    *,
    step: Step = NEWEST,
    dtype: str = "bf16",
    max_shard: Size = "5GB",
    timeout: float = 600.0,
    json: bool = False,
) -> int:
    """Write the weights of a checkpoint as a folder that Hugging Face's libraries read, with the run's tokenizer.

    A run that is running is saved first, beside training, and goes on. The files are copied box by box; no more than
    the pages under way are in memory.

    Exit codes: 0 written; 2 something to correct, nothing was written.

    Args:
        run: name or folder of a run, or one of its checkpoints, RUN/checkpoints/step_N.
        to: the new folder.
        step: of the checkpoint; by default the newest that can be used, and of a running run the present step.
        dtype: element type in the files: fp32, bf16 or fp16.
        max_shard: largest file, such as 5GB or 500MB; more go into several.
        timeout: seconds to wait for a running run to be saved.
        json: print one JSON object.
    """
    from dynatrain.execute.hf_export import Export, require_writable  # noqa: PLC0415 - torch: not for --help
    from dynatrain.train.weights import export as fill  # noqa: PLC0415
    from dynatrain.train.weights import open_checkpoint  # noqa: PLC0415

    most = _bytes(max_shard)
    asked, *_ = all_of(lambda: wanted(run, step), lambda: require_writable(to.absolute(), dtype, most))
    chosen = choose(asked, timeout)
    with kept(chosen, asked), passing_parents(to):
        shelf = open_checkpoint(chosen.folder, asked.shape)
        fill(shelf, Export.create(to, asked.shape, dtype=dtype, max_shard_bytes=most), asked.tokenizer)
    written = sum(file.stat().st_size for file in to.iterdir())
    if json:
        emit({"run": str(asked.run.path), "step": chosen.manifest.step, "folder": str(to.absolute()), "bytes": written})
    else:
        say(*filter(None, (chosen.note, f"step {chosen.manifest.step} of {asked.run.name}: {to}, {size(written)}")))
    return 0


def _bytes(text: str) -> int:
    """The bytes that a size says.

    Raises:
        MistakeError: it says none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in _UNITS:
        raise MistakeError(f"--max-shard is {text!r}; a number with B, kB, MB or GB behind it, such as 5GB.")
    size = float(found[1]) * _UNITS[found[2].upper()]
    if math.isinf(size):
        raise MistakeError("--max-shard is more bytes than there are numbers for; 5GB is usual.")
    return int(size)
