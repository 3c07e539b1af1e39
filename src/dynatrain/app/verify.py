"""Checking what a run wrote down: certificates against themselves, plans against what is derived anew."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynatrain.app.mistake import MistakeError
from dynatrain.app.planned import Change, change_of_record
from dynatrain.judge.certificate import check_certificate
from dynatrain.observe.fields import Rule, count, problems_of
from dynatrain.observe.objects import ObjectError, read_object
from dynatrain.plan.errors import PlanError
from dynatrain.plan.record import PlanRecord, PlanRecordError

_LOSS = "loss.json"
_TOLD: Rule = {
    "lost": [lambda one: isinstance(one, dict) and count(one.get("rank"))],
    "step": count,
    "files": lambda step: step is None or count(step),
}
"""What of a report of a loss is held against the plan."""
_NO_PLAN = "no plan.json beside the certificate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What a check found.

    Attributes:
        what: of what.
        claims: what it says, in a line; empty where it cannot be read.
        problems: what is wrong.
        record: the certificate as read; empty where there is none.
        saved: whether it is a checkpoint.
    """

    what: str
    claims: str = ""
    problems: tuple[str, ...] = ()
    record: dict[str, Any] = field(default_factory=dict)
    saved: bool = False


def check_file(path: Path) -> Checked:
    """Check a certificate or a plan.

    Raises:
        MistakeError: it is neither.
        ObjectError: it is no JSON object.
    """
    found = read_object(path)
    if "tensors" in found:
        return check_plan(path)
    if "outcome" in found:
        return _certificate(str(path), found)
    raise MistakeError(f"{path} is neither a certificate (certificate.json) nor a plan (plan.json) of a switch.")


def check_switch(folder: Path) -> Checked:
    """Check the folder of one switch: its certificate, its plan, and whether they belong together."""
    plan_path, certificate_path = folder / "plan.json", folder / "certificate.json"
    if not certificate_path.exists():
        return Checked(what=folder.name, problems=("no certificate: the switch never came to its end",), record={})
    try:
        checked = _certificate(folder.name, read_object(certificate_path))
    except ObjectError as error:
        checked = Checked(what=folder.name, problems=(str(error),), record={})
    if not plan_path.exists():
        return checked if checked.problems or not _planned(checked.record) else _with(checked, (_NO_PLAN,))
    plan, record, planned = _derived(plan_path)
    if checked.problems or plan.problems or record is None or planned is None:
        return _with(checked, plan.problems)
    return _with(checked, (*_apart(checked.record, record, planned), *_of_loss(folder / _LOSS, checked.record, record)))


def _of_loss(path: Path, certificate: dict[str, Any], record: PlanRecord) -> Iterator[str]:
    """In what the report of a loss, the certificate and the plan beside it differ.

    A switch that was asked for has no report, and a crossing that another loss has cut short has none either.
    """
    if (certificate["cause"]["verb"] == "loss") != (record.loss is not None):
        yield "the certificate and the plan do not agree on whether somebody was lost"
    if record.loss is None or not path.exists():
        return
    try:
        told = read_object(path)
    except ObjectError as error:
        yield str(error)
        return
    if problems := problems_of("loss", {key: told.get(key) for key in _TOLD}, _TOLD):
        yield from problems
        return
    plan = {
        "lost": [rank for rank, holder in enumerate(record.holders) if holder in record.loss.lost],
        "step": record.loss.step,
        "files": record.loss.files,
    }
    said = {"lost": [one["rank"] for one in told["lost"]], "step": told["step"], "files": told["files"]}
    yield from (
        f"{_LOSS} says {key} {said[key]}, the plan {value}" for key, value in plan.items() if said[key] != value
    )


def _planned(certificate: dict[str, Any]) -> bool:
    """Whether a switch came as far as to have a plan that is written down."""
    return certificate["outcome"] != "aborted" or int(certificate["plan_hash"], 16) != 0


def check_plan(path: Path) -> Checked:
    """Derive a plan anew from its record, compare, and have it judged."""
    return _derived(path)[0]


def _derived(path: Path) -> tuple[Checked, PlanRecord | None, Change | None]:
    """What a check of a plan found, the plan as recorded, and as derived anew; None as far as it cannot be."""
    try:
        record = PlanRecord.from_object(read_object(path))
        planned = change_of_record(record)
    except PlanRecordError as error:
        return Checked(what=str(path), problems=error.problems, record={}), None, None
    except (MistakeError, ObjectError, PlanError) as error:
        return Checked(what=str(path), problems=(str(error),), record={}), None, None
    whole = planned.whole()
    again = planned.record(whole, planned.summary(whole))
    compared = ["plan_hash", "bytes", "floor_bytes", "budget_bytes"]
    if record.mode == "keep":  # in tight they depend on an order that is computed once, and judged as such
        compared += ["peak_bytes", "rounds"]
    differing = [
        f"{name} is {getattr(record, name)}, derived anew it is {getattr(again, name)}"
        for name in compared
        if getattr(record, name) != getattr(again, name)
    ]
    checked = Checked(
        what=str(path),
        claims=f"{record.from_} -> {record.to}, plan {record.plan_hash}",
        problems=(*differing, *planned.verdict(whole).problems),
        record={},
    )
    return checked, record, planned


def _certificate(what: str, found: dict[str, Any]) -> Checked:
    problems = check_certificate(found) or tuple(_beyond_prediction(found))
    if problems:
        return Checked(what=what, problems=problems, record={})
    digest = ", digests equal" if found["digest"]["equal"] else ""
    claims = f"switch {found['switch']}: {found['from']} -> {found['to']} {found['outcome']}{digest}"
    return Checked(what=what, claims=claims, record=found)


def _peaks(certificate: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Peaks by rank, over the places in which state lies: two, where it is parked or comes back."""
    sums: dict[int, dict[str, Any]] = {}
    for place in ("device", "host"):
        for rank, peak in certificate["peak_bytes"][place].items():
            other = sums.setdefault(int(rank), {"predicted": 0, "measured": 0})
            known = None not in {peak["measured"], other["measured"]}
            sums[int(rank)] = {
                "predicted": other["predicted"] + peak["predicted"],
                "measured": other["measured"] + peak["measured"] if known else None,
            }
    return sums


def _beyond_prediction(certificate: dict[str, Any]) -> Iterator[str]:
    """Ranks of a committed switch in ``tight`` that held more than the plan said."""
    if (certificate["outcome"], certificate["mode"]) != ("committed", "tight"):
        return
    for rank, peak in _peaks(certificate).items():
        if peak["measured"] is not None and peak["measured"] > peak["predicted"]:
            yield f"rank {rank} held {peak['measured']} bytes; predicted, staging included, were {peak['predicted']}"


def _apart(certificate: dict[str, Any], record: PlanRecord, planned: Change) -> Iterator[str]:
    """In what a certificate and the plan beside it differ."""
    plan = {"from": record.from_, "to": record.to, "mode": record.mode, "plan_hash": record.plan_hash}
    committed = certificate["outcome"] == "committed"
    if committed:
        plan["bytes"] = record.bytes  # what was not moved is not claimed
    for name, value in plan.items():
        if certificate[name] != value:
            yield f"the certificate's {name} is {certificate[name]}, the plan's {value}"
    if committed:
        yield from _broken_promise(_peaks(certificate), record, planned)


def _broken_promise(peaks: dict[int, dict[str, Any]], record: PlanRecord, planned: Change) -> Iterator[str]:
    """Peaks that are not those of the plan, or above what ``tight`` promises."""
    if sorted(peaks) != list(range(len(record.peak_bytes))):
        yield f"the certificate has peaks of ranks {sorted(peaks)}, the plan of {len(record.peak_bytes)} ranks"
        return
    held = [max(sides) for sides in zip(planned.storage.old.tolist(), planned.storage.new.tolist(), strict=True)]
    for rank, peak in peaks.items():
        if peak["predicted"] < record.peak_bytes[rank]:
            yield f"rank {rank} is predicted {peak['predicted']} bytes, but holds {record.peak_bytes[rank]} in pieces"
        most, needed = held[rank] + record.budget_bytes, max(peak["predicted"], peak["measured"] or 0)
        if record.mode == "tight" and needed > most:
            yield f"rank {rank} needed {needed} bytes; tight promises max(old, new) + budget = {most}"


def _with(checked: Checked, problems: tuple[str, ...]) -> Checked:
    return Checked(
        what=checked.what, claims=checked.claims, problems=(*checked.problems, *problems), record=checked.record
    )
