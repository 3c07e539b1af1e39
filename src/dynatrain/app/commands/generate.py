"""``dynatrain generate RUN "prompt"``."""

import math
from pathlib import Path
from typing import Annotated

import tyro

from dynatrain.app.chosen import NEWEST, choose, kept, wanted
from dynatrain.app.cli import Checkpointed, Step, call
from dynatrain.app.mistake import MistakeError, all_of
from dynatrain.app.output import emit, say

Prompt = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")]
Number = Annotated[int, tyro.conf.arg(metavar="N")]
Temperature = Annotated[float, tyro.conf.arg(metavar="T")]


def run(words: list[str]) -> int:
    """The command."""
    return call(generate, words)


def generate(
    run: Checkpointed,
    prompt: Prompt,
    /,
    *,
    tokens: Number = 64,
    temperature: Temperature = 0.8,
    top_k: Number = 0,
    seed: Number = 0,
    step: Step = NEWEST,
    timeout: float = 600.0,
    json: bool = False,
) -> int:
    """Have a run's model continue a text, in this process, from its newest checkpoint.

    A run that is running is saved first, beside training, and goes on. The same arguments give the same text.

    Exit codes: 0 written; 2 something to correct.

    Args:
        run: name or folder of a run, or one of its checkpoints, RUN/checkpoints/step_N.
        prompt: the text to be continued; may be empty.
        tokens: tokens to write, at most; the end of a document ends it earlier.
        temperature: above 1 for more variety, below 1 for less; 0 always takes the most likely token.
        top_k: draw from so many of the most likely tokens; 0 for all.
        seed: of the draws.
        step: of the checkpoint; by default the newest that can be used, and of a running run the present step.
        timeout: seconds to wait for a running run to be saved.
        json: print one JSON object.
    """
    from dynatrain.data.tokenizer import end_marker, load_tokenizer  # noqa: PLC0415 - seconds; not for --help

    asked, _ = all_of(lambda: wanted(run, step), lambda: _refuse(prompt, tokens, temperature, top_k, seed))
    path = _tokenizer(asked.run.tokenizer)
    tokenizer = load_tokenizer(path)
    end = tokenizer.token_to_id(end_marker(path))
    begin = tokenizer.encode(prompt, add_special_tokens=False).ids or [end]
    chosen = choose(asked, timeout)
    from dynatrain.models.sample import continued  # noqa: PLC0415 - torch, which a mistake need not wait for
    from dynatrain.train.parallel import master_dtype  # noqa: PLC0415
    from dynatrain.train.weights import open_checkpoint, read_model  # noqa: PLC0415

    dtype = master_dtype(asked.config.precision.compute)
    with kept(chosen, asked):
        model = read_model(open_checkpoint(chosen.folder, asked.shape), asked.shape, dtype)
    new = continued(model, begin, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, end=end)
    text = tokenizer.decode(new)
    if json:
        about = {"run": str(asked.run.path), "step": chosen.manifest.step, "prompt": prompt}
        emit({**about, "text": text, "tokens": new, "ended": new[-1:] == [end]})
    else:
        say(*filter(None, (chosen.note, prompt + text)))
    return 0


def _refuse(prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> None:
    """Refuse what nothing can be drawn by.

    Raises:
        MistakeError: all of it.
    """
    problems = [] if tokens >= 1 else [f"--tokens is {tokens}; at least 1"]
    if halves := [at for at, letter in enumerate(prompt, 1) if "\ud800" <= letter <= "\udfff"]:
        problems.append(f"the prompt is not UTF-8 at character {halves[0]}; give it as UTF-8")
    if not 0 <= temperature < math.inf:
        problems.append(f"--temperature is {temperature:g}; at least 0")
    problems += [] if top_k >= 0 else [f"--top-k is {top_k}; at least 1, or 0 for all"]
    problems += [] if 0 <= seed < 2**63 else [f"--seed is {seed}; at least 0 and below 2^63"]
    if problems:
        raise MistakeError("\n".join(problems))


def _tokenizer(path: Path) -> Path:
    """The run's tokenizer.

    Raises:
        MistakeError: it has none.
    """
    if not path.is_file():
        raise MistakeError(
            f"There is no {path}: the run was trained on tokens that were there already. Put the tokenizer.json there "
            "with which they were made."
        )
    return path
