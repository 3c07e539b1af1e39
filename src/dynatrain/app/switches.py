"""Switches as people see them: a table of certificates, and one certificate in a few lines."""

from collections.abc import Iterator, Sequence
from typing import Any

from dynatrain.app.output import columns, seconds, size

Record = dict[str, Any]


def switch_table(records: Sequence[Record]) -> None:
    """Print a row for each certificate."""
    titles = ("switch", "after", "outcome", "moved", "re-laid", "adopted", "stall", "lost", "floor", "digest equal")
    columns(titles, map(_row, records))


def _row(record: Record) -> tuple[str, ...]:
    parts = record["bytes"]
    return (
        f"{record['switch']}  {record['from']} -> {record['to']}",
        f"{record['step'] + 1} steps",
        record["outcome"],
        *(size(parts[kind]) for kind in ("moved", "relaid", "adopted")),
        seconds(record["seconds"]["stall"]),
        seconds(record["lost_seconds"]),
        seconds(record["floor_seconds"]),
        "yes" if record["digest"]["equal"] else "NO" if record["digest"]["after"] else "-",
    )


def switch_lines(record: Record) -> Iterator[str]:
    """One certificate in a few lines."""
    parts, took, digest = record["bytes"], record["seconds"], record["digest"]
    layouts = f"{record['from']} -> {record['to']}"
    yield f"switch {record['switch']}: {layouts} {record['outcome']} after {record['step'] + 1} steps"
    moved = ", ".join(f"{word} {size(parts[kind])}" for kind, word in _BYTES)
    yield f"  bytes: {moved}"
    phases = ", ".join(f"{phase} {seconds(value)}" for phase, value in took.items() if value is not None)
    yield f"  seconds: {phases or 'none'}; floor {seconds(record['floor_seconds'])}"
    if digest["after"]:
        verdict = "equal" if digest["equal"] else "NOT equal"
        yield f"  digests of {len(digest['before'])} kinds of state, before and after: {verdict}"
    replicas = record["replicas"]
    if replicas["checked"]:
        mended = f", {replicas['mended']} given the first one's values" if replicas["mended"] else ""
        yield f"  replicas: {replicas['checked']} compared, {replicas['unequal']} unequal{mended}"


_BYTES = (("moved", "moved"), ("relaid", "re-laid"), ("adopted", "adopted"))
