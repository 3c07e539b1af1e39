"""The certificate of a switch: what a run claims to have done, written beside it, and checked offline.

``check_certificate`` looks at the record alone - no torch, no run: does it have every field, and does it contradict
itself? The fields are those of ``switches/NNN/certificate.json``.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from dynatrain.judge.verdict import Coverage
from dynatrain.layout.form import LayoutError
from dynatrain.layout.text import parse_layout
from dynatrain.observe.fields import ANY, Rule, count, duration, flag, hexadecimal, one_of, problems_of, text
from dynatrain.observe.modes import DECIDED, MODES
from dynatrain.observe.objects import parse_object
from dynatrain.observe.requests import CROSSINGS

SCHEMA = 3
"""Version of the record. 2 is read as well, which says step 0 also of what was before the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Number of ranks before and after."""

    old: int
    new: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Who wanted the switch: the verb (``switch``, ...), by whom (``cli``, ...), and the id of the request."""

    verb: str
    by: str
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Copies that must have equal bits.

    Attributes:
        groups: of holders.
        checked: copies compared within them.
        unequal: copies that differed from the first of their group before the switch.
        mended: of these, how many were given the first one's values before anything was moved, as the run wants it.
    """

    groups: int
    checked: int
    unequal: int
    mended: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """Full digests of live storage, by kind of state, as 16 hexadecimal digits.

    Attributes:
        algorithm: its name.
        before: of the old world's storage.
        after: of the new world's, computed without knowledge of ``before``; empty where the switch never came so far.
        equal: the claim that they agree.
    """

    algorithm: str
    before: Mapping[str, str]
    after: Mapping[str, str]
    equal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes of new pieces, over all ranks: from another rank, kept but laid out anew, kept where they lie.

    After a loss the rest of what is written comes from files.
    """

    moved: int
    relaid: int
    adopted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds of each phase on the slowest rank; None for a phase that was not entered."""

    build: float | None = None
    warm: float | None = None
    quiesce: float | None = None
    move: float | None = None
    check: float | None = None
    compile: float | None = None
    commit: float | None = None
    stall: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Most bytes of one rank at one time; ``measured`` is None where nothing was measured."""

    predicted: int
    measured: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBytes:
    """Peaks by rank, on the device and in host memory; empty where no state lies there."""

    device: Mapping[int, Peak]
    host: Mapping[int, Peak]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """One switch, as recorded. ``from_`` is ``from`` in the record.

    Attributes:
        schema: :data:`SCHEMA`, or 2 where an earlier version wrote it.
        run_id: the run.
        switch: number of the switch in the run, from 1.
        generation: of the world after it.
        step: the last step before it; -1 where it came before the first one.
        from_: the old layout's text.
        to: the new layout's text.
        world: ranks before and after.
        cause: who wanted it.
        mode: ``keep`` or ``tight``; as it was asked for where there never was a plan.
        outcome: ``committed``, ``aborted`` or ``failed``.
        plan_hash: as 16 hexadecimal digits.
        coverage: by kind of state, in bytes.
        replicas: comparison of copies.
        digest: before and after.
        bytes: of the plan; together they are what ``coverage`` says is written.
        seconds: by phase.
        lost_seconds: None until enough steps in the new layout are known.
        floor_seconds: None without a probe.
        peak_bytes: predicted and measured; of a crossing by holder: old ranks, then newcomers.
        transport: what carried the moves (``memory``, ``gloo``, ``nccl``; ``memory, gloo`` where machines are several).
        versions: of ``dynatrain``, ``python`` and ``torch`` at least.
        attempt: of the run: 0 for its first agent; a run that goes on begins where it was saved.
    """

    schema: int = SCHEMA
    run_id: str
    switch: int
    generation: int
    step: int
    from_: str
    to: str
    world: World
    cause: Cause
    mode: str
    outcome: str
    plan_hash: str
    coverage: Mapping[str, Coverage]
    replicas: Replicas
    digest: Digest
    bytes: Bytes
    seconds: Seconds
    lost_seconds: float | None = None
    floor_seconds: float | None
    peak_bytes: PeakBytes
    transport: str
    versions: Mapping[str, str]
    attempt: int = 0

    def to_json(self) -> str:
        """The record as text, keys in the order of the fields, ending in a newline."""
        record = {"from" if name == "from_" else name: value for name, value in asdict(self).items()}
        return json.dumps(record, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, written: str) -> "Certificate":
        """The certificate that :meth:`to_json` wrote.

        Raises:
            ValueError: the text is no JSON object, or no record without contradictions: all problems are named.
        """
        record = parse_object(written)
        if problems := check_certificate(record):
            raise ValueError("not a valid certificate: " + "; ".join(problems))
        peaks = {
            where: {int(rank): Peak(**peak) for rank, peak in ranks.items()}
            for where, ranks in record["peak_bytes"].items()
        }
        values = record | {
            "world": World(**record["world"]),
            "cause": Cause(**record["cause"]),
            "coverage": {kind: Coverage(**counts) for kind, counts in record["coverage"].items()},
            "replicas": Replicas(**record["replicas"]),
            "digest": Digest(**record["digest"]),
            "bytes": Bytes(**record["bytes"]),
            "seconds": Seconds(**record["seconds"]),
            "peak_bytes": PeakBytes(**peaks),
            "from_": record["from"],
        }
        del values["from"]
        return cls(**values)


def check_certificate(record: object) -> tuple[str, ...]:
    """What is wrong with a certificate as read from JSON; empty where nothing is."""
    problems = problems_of("certificate", record, _CERTIFICATE)
    if problems or not isinstance(record, Mapping):
        return problems
    return (*_contradictions(record), *(_unproven(record) if record["outcome"] == "committed" else ()))


_PEAK = {"predicted": count, "measured": lambda value: value is None or count(value)}
_CERTIFICATE: Mapping[str, Rule] = {
    "schema": lambda value: count(value) and value in (2, SCHEMA),
    "run_id": text,
    "switch": count,
    "generation": count,
    "step": lambda value: count(value) or (isinstance(value, int) and value == -1),
    "from": text,
    "to": text,
    "world": {"old": count, "new": count},
    "cause": {"verb": text, "by": text, "request_id": lambda value: isinstance(value, str)},
    "mode": one_of(*MODES),
    "outcome": one_of("committed", "aborted", "failed"),
    "plan_hash": hexadecimal,
    "coverage": {ANY: dict.fromkeys((one.name for one in fields(Coverage)), count)},
    "replicas": {"groups": count, "checked": count, "unequal": count, "mended": count},
    "digest": {"algorithm": text, "before": {ANY: hexadecimal}, "after": {ANY: hexadecimal}, "equal": flag},
    "bytes": {"moved": count, "relaid": count, "adopted": count},
    "seconds": dict.fromkeys((one.name for one in fields(Seconds)), duration),
    "lost_seconds": duration,
    "floor_seconds": duration,
    "peak_bytes": {"device": {ANY: _PEAK}, "host": {ANY: _PEAK}},
    "transport": text,
    "versions": {ANY: text},
    "attempt": count,
}


def _contradictions(record: Mapping[str, Any]) -> tuple[str, ...]:
    """What cannot be true of any switch."""
    problems = []
    if record["schema"] < SCHEMA and record["step"] < 0:
        problems.append(f"certificate.step is {record['step']}, which schema {record['schema']} has not")
    for kind, part in record["coverage"].items():
        if part["expected"] + part["twice"] != part["written"] + part["missing"]:
            problems.append(f"coverage.{kind}: expected + twice is not written + missing: {part}")
    written, parts = sum(part["written"] for part in record["coverage"].values()), record["bytes"]
    read = written - sum(parts.values())  # from files: only where a loss is mended is anything
    if read < 0 or (read and record["cause"]["verb"] != "loss"):
        problems.append(f"bytes {parts} add up to {sum(parts.values())}, but coverage says {written} are written")
    digest = record["digest"]
    really = bool(digest["before"]) and digest["before"] == digest["after"]
    if digest["equal"] != really:
        problems.append(f"digest.equal is {digest['equal']}, but before and after are {'' if really else 'not '}equal")
    if record["replicas"]["unequal"] > record["replicas"]["checked"]:
        problems.append(f"replicas: more are unequal than were checked: {record['replicas']}")
    if record["replicas"]["mended"] > record["replicas"]["unequal"]:
        problems.append(f"replicas: more were mended than are unequal: {record['replicas']}")
    old, new = record["world"]["old"], record["world"]["new"]
    # A crossing counts its newcomers behind the old ranks, of whom any number may leave.
    holders = old + new if record["cause"]["verb"] in CROSSINGS else max(old, new)
    for place in ("device", "host"):
        strangers = [rank for rank in record["peak_bytes"][place] if not _is_rank(rank, holders)]
        if strangers:
            problems.append(f"peak_bytes.{place} has ranks {strangers} outside a world of {holders}")
    problems += _misplaced(record)
    missing = [name for name in ("dynatrain", "python", "torch") if name not in record["versions"]]
    if missing:
        problems.append(f"versions lacks {missing}")
    return tuple(problems)


def _is_rank(name: str, world: int) -> bool:
    return len(name) < 10 and name.isascii() and name.isdecimal() and str(int(name)) == name and int(name) < world


def _misplaced(record: Mapping[str, Any]) -> Iterator[str]:
    """Layouts that are none, or not of their world's size."""
    for name, side in (("from", "old"), ("to", "new")):
        ranks = record["world"][side]
        try:
            layout = parse_layout(record[name])
        except LayoutError as error:
            yield f"{name} is not a layout: {'; '.join(error.problems)}"
        else:
            if layout.world_size != ranks:
                yield f"{name} is {record[name]}, of {layout.world_size} ranks, but world.{side} is {ranks}"


def _unproven(record: Mapping[str, Any]) -> tuple[str, ...]:
    """What a committed switch must show and this record does not."""
    problems = []
    if record["mode"] not in DECIDED:
        problems.append(f"committed, but the mode is {record['mode']}: it was never decided")
    if not record["coverage"]:
        problems.append("committed, but coverage names no state")
    for kind, part in record["coverage"].items():
        if part["expected"] != part["written"] or part["twice"] or part["missing"]:
            problems.append(f"committed, but {kind} is not covered exactly once: {part}")
    if uncovered := sorted(set(record["digest"]["before"]) ^ set(record["coverage"])):
        problems.append(f"committed, but {uncovered} are in only one of coverage and digest")
    if not record["digest"]["equal"]:
        problems.append("committed, but the digests before and after are not equal")
    if left := record["replicas"]["unequal"] - record["replicas"]["mended"]:
        problems.append(f"committed, but {left} replicas are unequal")
    if unknown := [phase for phase, value in record["seconds"].items() if value is None]:
        problems.append(f"committed, but the phases {unknown} have no seconds")
    return tuple(problems)
