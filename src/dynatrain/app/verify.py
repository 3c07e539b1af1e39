"""Checking what a run wrote down: certificates against themselves, plans against what is derived anew."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynatrain.app.mistake import MistakeError
from dynatrain.app.planned import change_of_record
from dynatrain.judge.certificate import check_certificate
from dynatrain.plan.record import PlanRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What a check found.

    Attributes:
        what: of what.
        claims: what it says, in a line; empty where it cannot be read.
        problems: what is wrong.
        record: the certificate as read; empty where there is none.
    """

    what: str
    claims: str = ""
    problems: tuple[str, ...] = ()
    record: dict[str, Any]


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        MistakeError: there is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MistakeError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise MistakeError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise MistakeError(f"{path} holds a {type(found).__name__}; a certificate or a plan is a JSON object.")
    return found


def check_file(path: Path) -> Checked:
    """Check a certificate or a plan.

    Raises:
        MistakeError: it is neither.
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
    checked = _certificate(folder.name, read_object(certificate_path))
    if not plan_path.exists():
        return checked if checked.problems else _with(checked, ("no plan.json beside the certificate",))
    plan = check_plan(plan_path)
    pair = () if checked.problems or plan.problems else tuple(_apart(checked.record, plan_path))
    return _with(checked, (*plan.problems, *pair))


def check_plan(path: Path) -> Checked:
    """Derive a plan anew from its record, compare, and have it judged."""
    record = PlanRecord.from_json(path.read_text(encoding="utf-8"))
    planned = change_of_record(record)
    whole = planned.whole()
    again = planned.record(whole, planned.summary(whole))
    compared = ["plan_hash", "bytes", "floor_bytes"]
    if record.mode == "keep":
        compared.append("peak_bytes")  # in tight it depends on an order that is computed once, and judged as such
    differing = [
        f"{name} is {getattr(record, name)}, derived anew it is {getattr(again, name)}"
        for name in compared
        if getattr(record, name) != getattr(again, name)
    ]
    verdict = planned.verdict(whole)
    return Checked(
        what=str(path),
        claims=f"{record.from_} -> {record.to}, plan {record.plan_hash}",
        problems=(*differing, *verdict.problems),
        record={},
    )


def _certificate(what: str, found: dict[str, Any]) -> Checked:
    problems = check_certificate(found)
    if problems:
        return Checked(what=what, problems=problems, record={})
    digest = ", digests equal" if found["digest"]["equal"] else ""
    claims = f"switch {found['switch']}: {found['from']} -> {found['to']} {found['outcome']}{digest}"
    return Checked(what=what, claims=claims, record=found)


def _apart(certificate: dict[str, Any], plan_path: Path) -> Iterator[str]:
    """In what a certificate and the plan beside it differ."""
    plan = read_object(plan_path)
    for name in ("from", "to", "mode", "plan_hash", "bytes"):
        if certificate["outcome"] != "committed" and name == "bytes":
            continue  # what was not moved is not claimed
        if certificate[name] != plan[name]:
            yield f"the certificate's {name} is {certificate[name]}, the plan's {plan[name]}"


def _with(checked: Checked, problems: tuple[str, ...]) -> Checked:
    return Checked(
        what=checked.what, claims=checked.claims, problems=(*checked.problems, *problems), record=checked.record
    )
