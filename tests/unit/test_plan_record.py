import dataclasses
import json

import pytest

from dynatrain.app.planned import change_of_model, change_of_record
from dynatrain.app.verify import check_file
from dynatrain.layout.text import parse_layout
from dynatrain.plan.record import PlanRecord, PlanRecordError
from dynatrain.space.presets import PRESETS

PAIR = (parse_layout("pp2.fsdp2"), parse_layout("fsdp2.tp2"))


def recorded(mode="keep"):
    planned = change_of_model(PRESETS["tiny"], PAIR, mode=mode)
    whole = planned.whole()
    return planned.record(whole, planned.summary(whole))


@pytest.mark.parametrize("mode", ["keep", "tight"])
def test_a_plan_is_derived_again_from_its_record(mode):
    record = recorded(mode)
    again = PlanRecord.from_json(record.to_json())
    assert again == record
    planned = change_of_record(again)
    whole = planned.whole()
    assert planned.record(whole, planned.summary(whole)) == record


def damaged(record, key):
    found = json.loads(record.to_json())
    match key:
        case "plan_hash":
            found["plan_hash"] = "0" * 16
        case "bytes":
            found["bytes"]["moved"] += 4
        case "peak_bytes":
            found["peak_bytes"][1] -= 1
        case "tensors":
            found["tensors"][3]["tensor"]["shape"][0] += 1
        case "adoptable":
            found["tensors"][1]["adoptable"] = not found["tensors"][1]["adoptable"]
        case "to":
            found["to"] = "fsdp2.tp2.order_0_2_1_3"
    return json.dumps(found)


def test_a_sound_record_passes_the_check(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(recorded().to_json())
    assert check_file(path).problems == ()


@pytest.mark.parametrize("key", ["plan_hash", "bytes", "peak_bytes", "tensors", "adoptable", "to"])
def test_every_change_of_a_record_is_found(tmp_path, key):
    path = tmp_path / "plan.json"
    path.write_text(damaged(recorded(), key))
    assert check_file(path).problems


def test_another_schema_and_other_texts_are_refused():
    later = dataclasses.replace(recorded(), schema=3).to_json()
    for text, said in ((later, "schema 3"), ("{}", "not a plan record"), ("[1]", "not a plan record"), ("", "not a")):
        with pytest.raises(PlanRecordError, match=said):
            PlanRecord.from_json(text)
