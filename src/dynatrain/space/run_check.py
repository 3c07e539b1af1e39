"""Whether the parts of a configuration fit each other: model, layouts, batch, data and schedule, judged together.

It stands here, above ``layout`` and ``space``, because a configuration knows neither.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynatrain.config.errors import ConfigError
from dynatrain.config.own import TOKENIZER
from dynatrain.config.run import STEPS_BETWEEN, Model, RunConfig
from dynatrain.data.corpus import already_tokenised
from dynatrain.layout.form import LayoutError
from dynatrain.layout.layout import Layout
from dynatrain.layout.legality import check, nearest
from dynatrain.layout.nearest import divisors
from dynatrain.layout.resolve import resolve
from dynatrain.layout.sizes import Sizes
from dynatrain.layout.text import parse_layout, print_layout, short_layout
from dynatrain.observe.paths import user_path
from dynatrain.space.decoder import DecoderShape
from dynatrain.space.hf_config import ModelError
from dynatrain.space.presets import PRESETS, resolve_model

_BYTE_TOKENS = 257
"""One token per byte, and the end of a document."""

_WARMUP_STEPS = 10
"""Steps of warm-up where nothing is said and the run is long enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRun:
    """A run whose parts fit.

    Attributes:
        config: as asked, with what was left open filled in (world size, dropout, warm-up) and every layout in canonical
            text.
        shape: the model, with the run's dropout.
        layout: the layout at the start, its pipeline split resolved.
        switches: ``(first step in it, layout)`` of each scheduled change, ascending.
    """

    config: RunConfig
    shape: DecoderShape
    layout: Layout
    switches: tuple[tuple[int, Layout], ...]

    def legal(self, layout: Layout, world_size: int = 0) -> Layout:
        """``layout`` as this run can have it, its pipeline split resolved.

        Args:
            layout: of all ranks of a world.
            world_size: of that world; 0 for the one that the configuration asks for.

        Raises:
            LayoutError: every rule that it breaks, and the nearest legal layouts.
        """
        check(layout, self.shape.limits(), world_size=world_size or self.layout.world_size, **self.given)
        return resolve(layout, self.shape.num_hidden_layers)

    @property
    def given(self) -> dict[str, Any]:
        """What this run, its model and its world apart, says to the rules of layouts, as their arguments."""
        return _given(self.config)

    @property
    def notes(self) -> tuple[str, ...]:
        """For people, at the start: what is other than asked for in some layouts."""
        layouts = (self.layout, *(layout for _, layout in self.switches)) if self.config.blocks.compile else ()
        reasons = {print_layout(layout): why for layout in layouts if (why := _eager_why(layout))}
        return tuple(f"blocks stay eager in {text}: torch.compile does not take {why}" for text, why in reasons.items())


def _eager_why(layout: Layout) -> str:
    if layout.size("tp") > 1:
        return "what tp cuts"
    return f"the backward in two halves of -{layout.schedule}" if layout.schedule else ""


def check_run(config: RunConfig) -> CheckedRun:
    """Judge the whole of a configuration.

    Raises:
        ConfigError: with everything that is wrong, the rule and the nearest legal choice each.
    """
    problems = [*_batch_problems(config), *_schedule_problems(config), *_validation_problems(config)]
    problems += [*_blocks_problems(config), *_text_problems(config), *sizes_of(config).contradictions()]
    problems += _loop_problems(config)
    shape = _shape(config, problems)
    texts = {"layout": config.layout}
    texts |= {f"switch.{i}.layout": switch.layout for i, switch in enumerate(config.switch)}
    parsed = {key: layout for key, text in texts.items() if (layout := _parsed(key, text, problems))}
    world_size = config.world.size or (parsed["layout"].world_size if "layout" in parsed else None)
    if shape:
        problems += [] if config.loop else _data_problems(config, shape)
        for key, layout in parsed.items():
            problems += _layout_problems(key, layout, shape, config, world_size)
    if not problems and world_size and (problem := sizes_of(config).problem(world_size)):
        problems.append(f"world.size: {problem}")
    if problems or shape is None:
        raise ConfigError("the run cannot start as configured", tuple(problems))
    layouts = [resolve(layout, shape.num_hidden_layers) for layout in parsed.values()]
    return CheckedRun(
        config=_filled(config, shape, layouts),
        shape=shape,
        layout=layouts[0],
        switches=tuple((switch.step, layout) for switch, layout in zip(config.switch, layouts[1:], strict=True)),
    )


def sizes_of(config: RunConfig) -> Sizes:
    """How many ranks a run may have."""
    world = config.world
    return Sizes(min=world.min, max=world.max or None, sizes=world.sizes, step=world.step)


def _shape(config: RunConfig, problems: list[str]) -> DecoderShape | None:
    try:
        shape = resolve_model(config.model.config, to_train=True)
    except ModelError as error:
        problems.append(f"model.config: {error}")
        return None
    return with_dropout(shape, config.model)


def with_dropout(shape: DecoderShape, asked: Model) -> DecoderShape:
    """The model's shape with the rates of dropout that a run sets."""
    return dataclasses.replace(
        shape,
        dropout=shape.dropout if asked.dropout is None else asked.dropout,
        attention_dropout=shape.attention_dropout if asked.attention_dropout is None else asked.attention_dropout,
    )


def _parsed(key: str, text: str, problems: list[str]) -> Layout | None:
    try:
        return parse_layout(text)
    except LayoutError as error:
        problems.append(f"{key}: {error}")
        return None


def _layout_problems(
    key: str, layout: Layout, shape: DecoderShape, config: RunConfig, world_size: int | None
) -> list[str]:
    limits, given = shape.limits(), _given(config)
    try:
        check(layout, limits, world_size=world_size, **given)
    except LayoutError as error:
        without = "" if key == "layout" else "\n--switch=[] takes all scheduled switches away"
        if error.nearest:
            return [f"{key}: {error}{without}"]
        # No layout of that size is legal: those of other sizes are what is left to choose from.
        near = nearest(layout, limits, **given)
        sized = (f"no layout of world.size = {config.world.size} ranks is legal",) if config.world.size else ()
        what = f"{short_layout(layout)} is not legal here"
        return [f"{key}: {LayoutError(what, (*error.problems, *sized), tuple(map(print_layout, near)))}{without}"]
    return []


def _given(config: RunConfig) -> dict[str, Any]:
    """What a run, its model and its world apart, says to the rules of layouts."""
    if config.loop:  # whose batches and sequences are its own
        return {"num_microbatches": None, "sequence": None, "schedule": config.pipeline.schedule}
    micro_batches, rest = divmod(config.batch.global_sequences, config.batch.micro_sequences)
    return {
        "num_microbatches": None if rest else micro_batches,
        "sequence": config.data.sequence,
        "schedule": config.pipeline.schedule,
    }


def _batch_problems(config: RunConfig) -> list[str]:
    total, micro = config.batch.global_sequences, config.batch.micro_sequences
    if total % micro == 0:
        return []
    near = " or ".join(map(str, sorted(sorted(divisors(total), key=lambda i: (abs(i - micro), i))[:2])))
    return [f"batch.micro_sequences = {micro} does not divide batch.global_sequences = {total}; nearest: {near}"]


def _schedule_problems(config: RunConfig) -> list[str]:
    problems = []
    decay = _decay(config)
    if _warmup(config) > decay:
        name = "steps" if config.optimizer.decay_steps is None else "optimizer.decay_steps"
        limit = f"at most {name} = {decay}"
        problems.append(f"optimizer.warmup_steps = {_warmup(config)}: {limit}")
    before = None
    for i, switch in enumerate(config.switch):
        if switch.step >= config.steps:
            problems.append(f"switch.{i}.step = {switch.step}: below steps = {config.steps}")
        if before is not None and switch.step < before + STEPS_BETWEEN:
            rule = f"{STEPS_BETWEEN} steps or more behind the switch before it, at step {before}"
            problems.append(f"switch.{i}.step = {switch.step}: {rule}; nearest: {before + STEPS_BETWEEN}")
        before = switch.step
        whole, rest = divmod(config.batch.global_sequences, config.batch.micro_sequences)
        if switch.after_micro_batches >= whole and not rest:
            said = f"below the {whole} of a step; nearest: {whole - 1}"
            problems.append(f"switch.{i}.after_micro_batches = {switch.after_micro_batches}: {said}")
    return problems


def _validation_problems(config: RunConfig) -> list[str]:
    if not config.validation.every or config.data.validation:
        return []
    seen = f"validation.every = {config.validation.every}, and data.validation = 0 holds out no document"
    return [f"{seen}; nearest: data.validation = 0.05, or validation.every = 0"]


def _blocks_problems(config: RunConfig) -> list[str]:
    if not config.blocks.compile or config.blocks.recompute != "selective":
        return []
    seen = "blocks.recompute = 'selective' beside blocks.compile = true"
    return [f"{seen}: of a compiled block the compiler itself chooses what is kept; nearest: 'none' or 'full'"]


def _loop_problems(config: RunConfig) -> list[str]:
    path, colon, name = config.loop.rpartition(":")
    if not config.loop or (colon and name.isidentifier() and user_path(path).is_file()):
        return []
    seen = f"there is no file {path}" if colon and name.isidentifier() else "it names no function"
    return [f"loop = {config.loop!r}: {seen}; FILE.py:FUNCTION, for example train.py:main"]


def _text_problems(config: RunConfig) -> list[str]:
    """Paths that a config.toml cannot hold."""
    texts = [
        ("loop", config.loop),
        ("model.config", config.model.config),
        *(("data.paths", path) for path in config.data.paths),
    ]
    rule = "is not UTF-8, and cannot be written down; nearest: a link to it under another name"
    return [f"{key} = {value!r}: {rule}" for key, value in texts if value != value.encode(errors="replace").decode()]


def _data_problems(config: RunConfig, shape: DecoderShape) -> list[str]:
    problems = [] if already_tokenised(config.data.paths) else _tokenizer_problems(config, shape)
    if config.data.sequence > shape.max_position_embeddings:
        limit = f"at most the model's longest sequence, {shape.max_position_embeddings}"
        problems.append(f"data.sequence = {config.data.sequence}: {limit}")
    return problems


def _tokenizer_problems(config: RunConfig, shape: DecoderShape) -> list[str]:
    asked, limit = config.data.tokenizer, f"at most the model's vocabulary, {shape.vocab_size}"
    if asked == "model":
        preset, path = config.model.config in PRESETS, tokenizer_of(config)
        seen = f"the preset {config.model.config} has none" if preset else f"there is no {path}"
        near = "nearest: data.tokenizer = 'bpe', which is trained on the documents, or 'bytes'"
        return [] if path.is_file() and not preset else [f"data.tokenizer = 'model': {seen}; {near}"]
    tokens = _BYTE_TOKENS if asked == "bytes" else config.data.vocab_size
    if tokens <= shape.vocab_size:
        return []
    what = "data.tokenizer = 'bytes'" if asked == "bytes" else "data.vocab_size"
    return [f"{what} makes {tokens} tokens; {limit}"]


def tokenizer_of(config: RunConfig) -> Path:
    """Where the tokenizer of a model lies that is a file or a folder."""
    model = user_path(config.model.config)
    return (model if model.is_dir() else model.parent) / TOKENIZER


def _warmup(config: RunConfig) -> int:
    asked = config.optimizer.warmup_steps
    return min(_WARMUP_STEPS, config.steps // 10) if asked is None else asked


def _decay(config: RunConfig) -> int:
    asked = config.optimizer.decay_steps
    return config.steps if asked is None else asked


def _filled(config: RunConfig, shape: DecoderShape, layouts: list[Layout]) -> RunConfig:
    """The configuration with nothing left open, so that what is written down says all."""
    first, *later = map(print_layout, layouts)
    return config.model_copy(
        update={
            "layout": first,
            "world": config.world.model_copy(update={"size": layouts[0].world_size}),
            "model": config.model.model_copy(
                update={"dropout": shape.dropout, "attention_dropout": shape.attention_dropout}
            ),
            "optimizer": config.optimizer.model_copy(
                update={"warmup_steps": _warmup(config), "decay_steps": _decay(config)}
            ),
            "switch": tuple(
                switch.model_copy(update={"layout": text}) for switch, text in zip(config.switch, later, strict=True)
            ),
        }
    )
