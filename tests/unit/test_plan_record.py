import dataclasses
import json
import random

import pytest
from tests import toys
from tests.losses import memory
from tests.plans.cases import LAYERS, small

from dynatrain.app.planned import change, change_of_model, change_of_record
from dynatrain.app.verify import check_file
from dynatrain.layout.legality import problems
from dynatrain.layout.text import parse_layout
from dynatrain.plan.loss import restore
from dynatrain.plan.record import SCHEMA, PlanRecord, PlanRecordError
from dynatrain.space.ownership import Ownership, declared
from dynatrain.space.presets import PRESETS
from dynatrain.space.tensor import State
from dynatrain.train.muster import renumbered

ONE = small(width=8, inner=12, vocabulary=16, states=(State("param", "float32"),))
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


def after_loss(files=None):
    """The plan by which ranks 0, 2 and 3 of four go on without rank 1, from memory or from files as well."""
    tensors, old = ONE, declared(ONE, parse_layout("fsdp4" if files else "dp2.fsdp2"), LAYERS)
    found = restore(tensors, old, lost={1}, kept=memory(4, 12), files={8} if files else ())
    holders = (0, 3, 1, 2)  # survivors in their order, and behind them the lost one
    planned = change(
        tensors,
        Ownership(old.layout.over(holders), old.placements),
        declared(tensors, parse_layout("fsdp2").over((0, 1)), LAYERS),
        members=(0, 1),
        mode="keep",
        holders=holders,
        loss=renumbered(found.loss, holders),
    )
    whole = planned.whole()
    assert planned.verdict(whole).problems == ()
    return planned.record(whole, planned.summary(whole))


@pytest.mark.parametrize("files", [None, 8])
def test_a_plan_after_a_loss_is_derived_again_and_judged_by_what_was_left(tmp_path, files):
    record = after_loss(files)
    again = PlanRecord.from_json(record.to_json())
    assert again == record
    assert (again.holders, again.loss.lost, again.loss.step, again.loss.files) == (
        *((0, 3, 1, 2), {3}, files or 12),
        files,
    )
    path = tmp_path / "plan.json"
    path.write_text(record.to_json())
    assert check_file(path).problems == ()
    # Said to have come from whoever is lost, it is refused.
    gone = json.loads(record.to_json())
    gone["loss"] = None
    gone["holders"] = []
    path.write_text(json.dumps(gone))
    assert check_file(path).problems


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("holders",), [0, 1, 2], "of 4 ranks each is another one of 0 .. 3"),
        (("loss", "lost"), [], "at least one of the holders 0 .. 3"),
        (("loss", "lost"), [7], "at least one of the holders 0 .. 3"),
        (("loss", "lost"), [0], "is lost"),
        (("loss", "step"), 13, "elements missing"),
        (("loss", "kept", 0, "owner"), 9, "is not of the holders"),
        (("loss", "kept"), [], "elements missing"),
        (("loss",), {"lost": [3]}, "loss is"),
        (("mode",), "tight", "after a loss it is keep"),
    ],
)
def test_damage_to_what_a_plan_says_of_a_loss_is_found(tmp_path, place, value, said):
    found = json.loads(after_loss().to_json())
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(found))
    problems = check_file(path).problems
    assert any(said in problem for problem in problems), problems


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
