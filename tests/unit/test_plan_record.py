import dataclasses
import json
import random

import pytest
from tests import toys

from dynatrain.app.planned import change, change_of_model, change_of_record
from dynatrain.app.verify import check_file
from dynatrain.layout.legality import problems
from dynatrain.layout.text import parse_layout
from dynatrain.plan.record import SCHEMA, PlanRecord, PlanRecordError
from dynatrain.space.ownership import declared
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


def test_a_plan_over_all_axes_is_derived_again_from_its_record():
    of = toys.toy(random.Random(2).choice)
    of = dataclasses.replace(of, layers=4, experts=4, expert_inner=4, heads=4, kv_heads=2, width=8, inner=8, dense=1)
    layouts = [parse_layout(text) for text in ("pp2v2-zbv.fsdp2-z2.tp4.ep4.etp2", "tp4.cp2-ring.fsdp2.ep2.etp4")]
    assert [problems(layout, of.limits) for layout in layouts] == [(), ()]
    tensors = toys.catalogue(of)
    planned = change(tensors, *(declared(tensors, layout, of.layers) for layout in layouts), mode="keep")
    whole = planned.whole()
    record = planned.record(whole, planned.summary(whole))
    again = PlanRecord.from_json(record.to_json())
    assert again == record
    assert {axis for one in again.tensors for axis, _ in (*one.old.cuts, *one.new.cuts)} == {
        *("fsdp", "tp", "tp2", "efsdp", "ep", "etp")
    }
    anew = change_of_record(again)
    whole = anew.whole()
    assert anew.record(whole, anew.summary(whole)) == record
    assert anew.verdict(whole).ok


def test_a_crossing_is_derived_again_in_the_texts_of_its_worlds():
    layouts = parse_layout("fsdp2.tp2.order_0_2_1_3"), parse_layout("tp2.fsdp2.order_1_0_2_3")
    planned = change_of_model(PRESETS["tiny"], layouts, members=(0, 5, 3, 4), mode="tight")
    assert planned.layouts == ("fsdp2.tp2.order_0_2_1_3", "tp2.fsdp2.order_1_0_2_3")
    whole = planned.whole()
    assert planned.verdict(whole).ok
    summary = planned.summary(whole)
    record = planned.record(whole, summary)
    again = PlanRecord.from_json(record.to_json())
    assert again == record
    assert again.members == (0, 5, 3, 4)
    anew = change_of_record(again)
    assert anew.record(whole, anew.summary(whole)) == record
    assert anew.record(anew.whole(), summary).plan_hash == record.plan_hash
    # 1 and 2 leave: nothing comes in; 4 and 5 come: nothing goes out.
    assert [rank for rank, size in enumerate(summary.bytes_in) if not size and not summary.relaid[rank]] == [1, 2]
    assert [rank for rank, size in enumerate(summary.bytes_out) if not size][-2:] == [4, 5]


@pytest.mark.parametrize("members", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 5], [0, 1, 2, 10**12], [0, 1, 2, -1]])
def test_members_that_cannot_be_are_refused(members):
    found = json.loads(recorded().to_json()) | {"members": members}
    with pytest.raises(PlanRecordError, match="members"):
        PlanRecord.from_object(found)


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
        case "members":
            found["members"] = [0, 1, 3, 2]
        case "to":
            found["to"] = "fsdp2.tp2.order_0_2_1_3"
    return json.dumps(found)


def test_a_sound_record_passes_the_check(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(recorded().to_json())
    assert check_file(path).problems == ()


@pytest.mark.parametrize("key", ["plan_hash", "bytes", "peak_bytes", "tensors", "adoptable", "members", "to"])
def test_every_change_of_a_record_is_found(tmp_path, key):
    path = tmp_path / "plan.json"
    path.write_text(damaged(recorded(), key))
    assert check_file(path).problems


def test_another_schema_and_other_texts_are_refused():
    later = dataclasses.replace(recorded(), schema=SCHEMA + 1).to_json()
    for text, said in (
        (later, f"schema {SCHEMA + 1}"),
        ("{}", "not a plan record"),
        ("[1]", "not a plan record"),
        ("", "not a"),
    ):
        with pytest.raises(PlanRecordError, match=said):
            PlanRecord.from_json(text)
