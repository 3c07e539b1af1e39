"""``dynatrain bench switch``."""

import os
import signal
import sys
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from dynatrain.app.cli import call
from dynatrain.app.mistake import MistakeError, all_of
from dynatrain.app.output import columns, console, emit, say, seconds, size
from dynatrain.layout.foreign import read_layout
from dynatrain.layout.layout import Layout
from dynatrain.layout.legality import check
from dynatrain.layout.text import print_layout
from dynatrain.observe.paths import user_path
from dynatrain.space.presets import resolve_model

if TYPE_CHECKING:
    from dynatrain.train.bench import Row

What = Annotated[Literal["switch"], tyro.conf.Positional]
Model = Annotated[str, tyro.conf.arg(metavar="M")]
From = Annotated[str, tyro.conf.arg(name="from", metavar="LAYOUT")]
Checkpoints = Annotated[str, tyro.conf.arg(metavar="FOLDER")]
To = Annotated[str, tyro.conf.arg(metavar="LAYOUT")]

CASES = (("fsdp4", "fsdp2.tp2"), ("fsdp4", "pp2.fsdp2"), ("dp2.fsdp2", "fsdp4"))
"""What is measured on four ranks where no layouts are named."""
FAILED, TERMINATED = 3, 128 + signal.SIGTERM


def run(words: list[str]) -> int:
    """The command."""
    return call(bench, words)


def bench(
    _what: What,
    /,
    *,
    model: Model = "200m",
    ranks: int = 4,
    old: From = "",
    to: To = "",
    repeats: int = 5,
    slow_repeats: int = 1,
    checkpoints: Checkpoints = "/dev/shm",  # noqa: S108 - tmpfs is the point
    json: bool = False,
) -> int:
    """Measure how fast the state of AdamW in fp32 changes its layout, and what else there is for it.

    Ranks are processes of this machine's CPU. The state is generated, nothing is trained. All methods run in turn, a
    restart of all processes last, and every outcome is checked by digests. Exit codes: 0 measured; 2 nothing was done;
    3 a rank failed, or a method brought other state than there was.

    Args:
        model: a preset, or a folder with a config.json.
        ranks: processes.
        old: the layout before; without it, three pairs of layouts of four ranks.
        to: the layout after.
        repeats: runs of dynatrain in each mode, by the nearest transport and by gloo alone.
        slow_repeats: runs of the other methods, which take many times as long.
        checkpoints: where dcp, reload and restart write, and what they write is removed: memory, or a folder on a disk.
        json: print one JSON object.
    """
    shape = resolve_model(model)
    if bool(old) != bool(to):
        raise MistakeError("--from and --to go together: name both layouts, or none.")
    if not old and ranks != 4:
        raise MistakeError(f"The usual pairs are of 4 ranks; for {ranks}, name the layouts with --from and --to.")
    if not 0 <= slow_repeats <= repeats or repeats < 1:
        raise MistakeError(
            f"--repeats {repeats} --slow-repeats {slow_repeats}: at least 1 run, and not more slow ones."
        )
    folder = user_path(checkpoints)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise MistakeError(f"--checkpoints {checkpoints} is no folder that can be written to; name one that is.")
    cases = ((old, to),) if old else CASES
    layouts = all_of(*(lambda text=text: read_layout(text) for case in cases for text in case))
    all_of(*(lambda layout=layout: check(layout, shape.limits(), world_size=ranks) for layout in layouts))
    from dynatrain.train.bench import BenchError, run_bench  # noqa: PLC0415 - torch, which a mistake need not wait for

    # Its checkpoints lie in memory: whoever ends the bench gets that memory back.
    signal.signal(signal.SIGTERM, _end)
    out = console(error=True)
    try:
        rows = run_bench(
            shape,
            _pairs(layouts),
            ranks=ranks,
            repeats=repeats,
            slow_repeats=slow_repeats,
            tell=out.print,
            checkpoints=folder,
        )
    except BenchError as error:
        out.print(str(error))
        return FAILED
    if json:
        emit({"model": model, "ranks": ranks, "rows": [asdict(row) for row in rows]})
    else:
        _table(rows)
    return 0


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(TERMINATED)


def _pairs(layouts: tuple[Layout, ...]) -> tuple[tuple[str, str], ...]:
    texts = [print_layout(layout) for layout in layouts]
    return tuple(zip(texts[::2], texts[1::2], strict=True))


def _table(rows: "tuple[Row, ...]") -> None:
    titles = (
        "case",
        "method",
        "seconds",
        "range",
        "digest",
        "stall",
        "floor",
        "ratio",
        "peak per rank",
        "allowed",
        "runs",
    )
    columns(
        titles,
        [
            (
                row.case,
                f"{row.method} {row.mode} {row.transport}".rstrip(),
                seconds(row.seconds),
                "-" if row.seconds_range is None else "-".join(f"{value:.2f}" for value in row.seconds_range),
                seconds(row.digest_seconds),
                seconds(row.stall_seconds),
                seconds(row.floor_seconds),
                "-" if row.ratio is None else f"{row.ratio:.2f}",
                size(row.peak_bytes or None),
                size(row.allowed_bytes or None),
                str(row.runs),
            )
            for row in rows
        ],
    )
    say(*(f"{row.case}, {row.method}: {row.note}" for row in rows if row.note))
