"""Switches as people see them: a table of certificates, and one certificate in a few lines."""

from collections.abc import Iterator, Sequence
from typing import Any

from dynatrain.app.ask import CODES, ask
from dynatrain.app.output import columns, emit, say, seconds, size
from dynatrain.app.runs import certificate_for, find_run

Record = dict[str, Any]


def switch_table(records: Sequence[Record]) -> None:
    """Print a row for each certificate."""
    titles = ("switch", "after", "outcome", "moved", "re-laid", "adopted", "stall", "lost", "floor", "digest equal")
    columns(titles, map(_row, records))


def _row(record: Record) -> tuple[str, ...]:
    parts = record["bytes"]
    return (
        f"{record['switch']}  {change_text(record)}",
        f"{record['step'] + 1} steps",
        record["outcome"],
        *(size(parts[kind]) for kind in ("moved", "relaid", "adopted")),
        seconds(record["seconds"]["stall"]),
        seconds(record["lost_seconds"]),
        seconds(record["floor_seconds"]),
        "yes" if record["digest"]["equal"] else "NO" if record["digest"]["after"] else "-",
    )


def change_text(record: Record) -> str:
    """From where to where."""
    verb = record["cause"]["verb"]
    old, new = ("host" if verb == away else record[end] for away, end in (("unpark", "from"), ("park", "to")))
    return f"{old} -> {new}"


def switch_lines(record: Record) -> Iterator[str]:
    """One certificate in a few lines."""
    parts, took, digest = record["bytes"], record["seconds"], record["digest"]
    yield f"switch {record['switch']}: {change_text(record)} {record['outcome']} after {record['step'] + 1} steps"
    moved = ", ".join(f"{word} {size(parts[kind])}" for kind, word in _BYTES)
    yield f"  bytes: {moved}"
    phases = ", ".join(f"{phase} {seconds(value)}" for phase, value in took.items() if value is not None)
    yield f"  seconds: {phases or 'none'}; floor {seconds(record['floor_seconds'])}"
    for place, of in record["peak_bytes"].items():
        if of:
            most = max(peak["predicted"] for peak in of.values())
            held = [peak["measured"] for peak in of.values() if peak["measured"] is not None]
            said = f", {size(max(held))} measured" if held else ""
            yield f"  most of one rank, {place}: {size(most)} predicted{said}"
    if digest["after"]:
        verdict = "equal" if digest["equal"] else "NOT equal"
        yield f"  digests of {len(digest['before'])} kinds of state, before and after: {verdict}"
    replicas = record["replicas"]
    if replicas["checked"]:
        mended = f", {replicas['mended']} given the first one's values" if replicas["mended"] else ""
        yield f"  replicas: {replicas['checked']} compared, {replicas['unequal']} unequal{mended}"


def ask_for_travel(run: str, verb: str, timeout: float, *, json: bool) -> int:
    """Ask a run to park, or to unpark, and say what it took; the exit code."""
    folder = find_run(run)
    request, answer = ask(folder, verb, {}, timeout)
    record = certificate_for(folder, request)
    if json:
        emit({"id": request, "outcome": answer.outcome, "message": answer.message, "certificate": record or None})
    else:
        say(f"{folder.name}: {answer.outcome}{f', {answer.message}' if answer.message else ''}")
        say(*(switch_lines(record) if record else ()))
    return CODES[answer.outcome]


_BYTES = (("moved", "moved"), ("relaid", "re-laid"), ("adopted", "adopted"))
