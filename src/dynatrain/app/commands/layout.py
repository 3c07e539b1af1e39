"""``dynatrain layout TEXT [TEXT]``."""

from typing import Annotated

import tyro

from dynatrain.app.cli import call
from dynatrain.app.mistake import MistakeError, all_of
from dynatrain.app.output import emit, say
from dynatrain.layout.explain import describe, difference
from dynatrain.layout.foreign import read_layout
from dynatrain.layout.layout import Layout
from dynatrain.layout.legality import check
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import print_layout
from dynatrain.space.presets import resolve_model

Texts = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT [TEXT]")]


def run(words: list[str]) -> int:
    """The command. Settings of other trainers are one quoted word that begins with dashes: a value, not an option."""
    return call(layout, [f" {word}" if _is_settings(word) else word for word in words])


def layout(texts: Texts, /, *, model: str = "", json: bool = False) -> int:
    """Explain a layout, or the difference of two.

    A layout is fsdp2.tp2-sp and the like, or another trainer's settings in one pair of quotes, such as
    '--tensor-model-parallel-size 2 --world-size 8' (Megatron) or 'tensor_parallel_degree=2 world_size=8' (torchtitan).

    Args:
        texts: one layout, or two.
        model: also hold it against this model (a preset, or a folder with a config.json).
        json: print one JSON object.
    """
    if not 1 <= len(texts) <= 2:
        raise MistakeError(f"{len(texts)} layouts were given; one is explained, two are compared.")
    layouts = all_of(*(lambda text=text: read_layout(text.strip()) for text in texts))
    if model:
        shape = resolve_model(model)
        all_of(*(lambda one=one: check(one, shape.limits()) for one in layouts))
        layouts = tuple(resolve(one, shape.num_hidden_layers) for one in layouts)
    if json:
        emit({"layouts": [_record(one) for one in layouts]})
        return 0
    for one in layouts:
        say(*describe(one))
    if len(layouts) == 2:
        say(*difference(*layouts))
    if model:
        say(f"{'Both are' if len(layouts) == 2 else 'It is'} legal for {model}.")
    return 0


def _is_settings(word: str) -> bool:
    return word.startswith("-") and " " in word and not word.startswith("--model=")


def _record(layout: Layout) -> dict[str, object]:
    return {
        "text": print_layout(layout),
        "world_size": layout.world_size,
        "axes": dict(layout.axes),
        "chunks": layout.chunks,
        "stages": layout.stages,
        "schedule": layout.schedule,
        "zero": layout.zero,
        "cp_method": layout.cp_method,
        "sp": layout.sp,
        "ep": layout.ep,
        "etp": layout.etp,
        "order": layout.order,
    }
