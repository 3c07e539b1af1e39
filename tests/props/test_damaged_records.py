"""A file that was damaged anywhere is found unsound or refused, and never called a bug of ours."""

import copy
import io
import json
import sys
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynatrain.app.main import main
from dynatrain.app.planned import change, change_of_model
from dynatrain.layout.text import parse_layout
from dynatrain.observe.checkpoints import checkpoint_name, newest
from dynatrain.plan.plan import Kept, Loss
from dynatrain.space.ownership import Ownership
from dynatrain.space.presets import PRESETS

PAIR = (parse_layout("pp2.fsdp2"), parse_layout("fsdp2.tp2"))
CROSSING = (parse_layout("pp2.fsdp2"), parse_layout("fsdp3"))


def written(mode, layouts=PAIR, members=()):
    """``(plan, certificate)`` of a switch of five tensors, as read from JSON."""
    whole_model = change_of_model(PRESETS["tiny"], layouts, members=members, mode=mode)
    planned = change(whole_model.catalogue[:5], whole_model.old, whole_model.new, members=members, mode=mode)
    return files_of(planned, "scale" if members else "switch")


def written_after_a_loss():
    """The same of the repair after rank 1 of four was lost: the others are holders 0 to 2, and it is holder 3."""
    old, new = parse_layout("dp2.fsdp2"), parse_layout("fsdp2")
    model = change_of_model(PRESETS["tiny"], (old, new), members=(0, 1), mode="keep")
    holders = (0, 3, 1, 2)
    kept = tuple(Kept(holder=holder, owner=holder, step=4, live=True) for holder in range(4))
    planned = change(
        model.catalogue[:5],
        Ownership(old.over(holders), model.old.placements),
        model.new,
        members=(0, 1),
        mode="keep",
        holders=holders,
        loss=Loss(lost=frozenset({3}), step=4, kept=kept),
    )
    return files_of(planned, "loss")


def files_of(planned, verb):
    """``(plan, certificate)`` of a change, as read from JSON."""
    whole = planned.whole()
    record = planned.record(whole, planned.summary(whole))
    coverage = planned.verdict(whole).coverage
    digests = dict.fromkeys(coverage, "0" * 16)
    certificate = {
        "schema": 2,
        "run_id": "r",
        "switch": 1,
        "generation": 0,
        "attempt": 0,
        "step": 4,
        "from": record.from_,
        "to": record.to,
        "world": {"old": 4, "new": parse_layout(record.to).world_size},
        "cause": {"verb": verb, "by": "cli", "request_id": "7"},
        "mode": record.mode,
        "outcome": "committed",
        "plan_hash": record.plan_hash,
        "coverage": {
            kind: {name: getattr(counts, name) for name in ("expected", "written", "twice", "missing")}
            for kind, counts in coverage.items()
        },
        "replicas": {"groups": 2, "checked": 4, "unequal": 0, "mended": 0},
        "digest": {"algorithm": "sum", "before": digests, "after": digests, "equal": True},
        "bytes": dict(record.bytes),
        "seconds": dict.fromkeys(("build", "warm", "quiesce", "move", "check", "compile", "commit", "stall"), 0.5),
        "lost_seconds": 0.5,
        "floor_seconds": 0.25,
        "peak_bytes": {
            "device": {},
            "host": {str(i): {"predicted": peak, "measured": peak} for i, peak in enumerate(record.peak_bytes)},
        },
        "transport": "gloo",
        "versions": {"dynatrain": "0", "python": "3", "torch": "2"},
    }
    return json.loads(record.to_json()), json.loads(json.dumps(certificate))


SWITCHES = {mode: written(mode) for mode in ("keep", "tight")} | {
    "crossing": written("tight", CROSSING, (2, 5, 4)),
    "loss": written_after_a_loss(),
}


def check(folder, plan, certificate):
    """``(exit code, everything said)`` of ``dynatrain check`` on a switch whose files hold these values, or bytes."""
    folder.mkdir(exist_ok=True)
    for name, value in (("plan.json", plan), ("certificate.json", certificate)):
        (folder / name).write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    said, codes = "", set()
    for path in (folder, folder / "plan.json", folder / "certificate.json"):
        with mock.patch.multiple(sys, argv=["dynatrain", "check", str(path)], stdout=out, stderr=err):
            codes.add(main())
    for stream in (out, err):
        stream.flush()
        said += stream.buffer.getvalue().decode()
    return codes, said


def places(value, at=()):
    """The paths of all values within a value."""
    yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from places(inner, (*at, key))


JUNK = st.one_of(
    st.sampled_from([None, True, False, 0, 1, -1, 7, 2.5, 2**31, 2**62, 10**30, 1e300, "", "x", "zzz", "keep", "auto"]),
    st.sampled_from(["0" * 16, "tp2", "dp4", "float32", "fsdp", "pp", "last", "\ud800", "\n", "٣", [], {}, [[]]]),
    st.sampled_from(
        [
            ["tp", 0],
            ["fsdp", 1],
            ["efsdp", 0],
            ["tp3", 0],
            [0, 1],
            ["committed"],
            {"0": 1},
            {"\ud800": 0},
            [0],
            [1, 0],
            [0, 0],
        ]
    ),
)


@st.composite
def damaged(draw):
    """A switch's two values, of which one has one or two places replaced, removed, repeated or added to."""
    mode = draw(st.sampled_from(sorted(SWITCHES)))
    files = copy.deepcopy(list(SWITCHES[mode]))
    which = draw(st.integers(0, 1))
    for _ in range(draw(st.integers(1, 2))):
        # By depth first: there are few places above the tensors, and many in them.
        by_depth = {}
        for place in places(files[which]):
            by_depth.setdefault(len(place), []).append(place)
        place = draw(st.sampled_from(by_depth[draw(st.sampled_from(sorted(by_depth)))]))
        how, junk = draw(st.sampled_from(["put", "drop", "more"])), copy.deepcopy(draw(JUNK))
        files[which] = altered(files[which], place, how, junk)
    return files


def altered(value, place, how, junk):
    """``value`` with what stands at ``place`` replaced, dropped, or doubled."""
    if not place:
        return junk
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    key = place[-1]
    if how == "put":
        inner[key] = junk
    elif how == "drop":
        del inner[key]
    elif isinstance(inner, list):
        inner.insert(key, copy.deepcopy(inner[key]))
    else:
        inner[f"{key}'"] = inner[key]
    return value


MANIFEST_OF_7 = {
    "schema": 1,
    "run_id": "r",
    "step": 7,
    "layout": "dp1",
    "world_size": 1,
    "states": ["param"],
    "objects": [],
    "files": [
        {"name": ".metadata", "size": 2, "xxh3": "0" * 16},
        {"name": "__0_0.distcp", "size": 3, "xxh3": "1" * 16},
    ],
    "versions": {"dynatrain": "0", "torch": "2"},
}


def found_beside(root, manifest):
    """``(newest checkpoint, what is wrong)`` where step 3 is whole, and step 7 has this manifest, or these bytes."""
    for step, content in ((3, MANIFEST_OF_7 | {"step": 3}), (7, manifest)):
        folder = root / checkpoint_name(step)
        folder.mkdir(exist_ok=True)
        (folder / ".metadata").write_bytes(b"12")
        (folder / "__0_0.distcp").write_bytes(b"123")
        (folder / "manifest.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return newest(root)


def test_the_newest_checkpoint_that_is_whole_is_taken(tmp_path):
    assert found_beside(tmp_path, MANIFEST_OF_7) == (tmp_path / checkpoint_name(7), ())


NAMES = [None, "..", "../x", "/etc/hosts", "x" * 300, "a\0b", "", 7]


@pytest.mark.parametrize(
    "manifest",
    [
        *({**MANIFEST_OF_7, "files": [{"name": name, "size": 2, "xxh3": "0" * 16}]} for name in NAMES),
        *({**MANIFEST_OF_7, "schema": schema} for schema in (0, 2, True, 1.5, "1", None)),
        *({**MANIFEST_OF_7, "step": step} for step in ("five", 3, 8, None, 7.5)),
        {**MANIFEST_OF_7, "states": "param"},
        {**MANIFEST_OF_7, "world_size": None},
        {**MANIFEST_OF_7, "world_size": 0},
        {**MANIFEST_OF_7, "more": 0},
        {},
        [],
        b"",
        b"\xff",
        b"[" * 100_000,
        b'{"step": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_damaged_manifest_leaves_the_checkpoint_before_it(tmp_path, manifest):
    folder, (problem,) = found_beside(tmp_path, manifest)
    assert folder == tmp_path / checkpoint_name(3)
    assert str(tmp_path / checkpoint_name(7)) in problem
    if manifest == {**MANIFEST_OF_7, "schema": 0}:
        assert "later version" not in problem


def test_a_checkpoint_of_a_loop_that_names_no_run_is_one(tmp_path):
    assert found_beside(tmp_path, {**MANIFEST_OF_7, "run_id": ""}) == (tmp_path / checkpoint_name(7), ())


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=JUNK, where=st.integers(0, 10**6), how=st.sampled_from(["put", "drop", "more"]))
def test_a_manifest_damaged_anywhere_never_hides_the_checkpoint_before_it(tmp_path, junk, where, how):
    manifest = copy.deepcopy(MANIFEST_OF_7)
    every = list(places(manifest))
    manifest = altered(manifest, every[where % len(every)], how, copy.deepcopy(junk))
    folder, problems = found_beside(tmp_path, manifest)
    assert folder == tmp_path / checkpoint_name(3 if problems else 7)


@pytest.mark.parametrize("mode", SWITCHES)
def test_a_sound_switch_is_sound(tmp_path, mode):
    codes, said = check(tmp_path / "001", *SWITCHES[mode])
    assert codes == {0}, said


REPORT = {"lost": [{"rank": 1, "member": 1}], "step": 4, "files": None}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, ""),
        ({"lost": [{"rank": 3, "member": 3}]}, "loss.json says lost [3], the plan [1]"),
        ({"step": 3}, "loss.json says step 3, the plan 4"),
        ({"files": 4}, "loss.json says files 4, the plan None"),
        ({"lost": [3]}, "loss.lost[0] is 3"),
    ],
)
def test_the_report_of_a_loss_is_held_against_the_plan_of_its_repair(tmp_path, told, said):
    (tmp_path / "001").mkdir()
    (tmp_path / "001" / "loss.json").write_text(json.dumps(REPORT | told))
    codes, found = check(tmp_path / "001", *SWITCHES["loss"])
    assert (max(codes), said in found) == (3 if said else 0, True), found


def test_a_certificate_of_a_loss_and_a_plan_of_none_do_not_go_together(tmp_path):
    plan, certificate = copy.deepcopy(SWITCHES["keep"])
    certificate["cause"]["verb"] = "loss"
    codes, found = check(tmp_path / "001", plan, certificate)
    assert (max(codes), "do not agree on whether somebody was lost" in found) == (3, True), found


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=damaged())
def test_a_file_damaged_anywhere_is_never_called_a_bug(tmp_path, files):
    codes, said = check(tmp_path / "001", *files)
    assert codes <= {0, 2, 3}, said


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    where=st.floats(0, 1, exclude_max=True),
    letters=st.one_of(st.binary(max_size=3), st.text(max_size=2).map(str.encode)),
    cut=st.integers(0, 3),
)
def test_a_text_damaged_anywhere_is_never_called_a_bug(tmp_path, where, letters, cut):
    texts = [json.dumps(value).encode() for value in SWITCHES["keep"]]
    for i, whole in enumerate(texts):
        at = int(where * len(whole))
        files = [whole[:at] + letters + whole[at + cut :] if i == j else texts[j] for j in range(2)]
        codes, said = check(tmp_path / "001", *files)
        assert codes <= {0, 2, 3}, said


DAMAGE = {
    "outcome of a list": (1, ["outcome"], ["committed"], "certificate.outcome is ['committed']"),
    "no layout": (1, ["from"], "zzz", "from is not a layout"),
    "another world": (1, ["to"], "tp2", "world.new is 4"),
    "a peak of nothing": (1, ["peak_bytes", "host", "1", "predicted"], 10, "rank 1"),
    "a peak without end": (1, ["peak_bytes", "host", "1", "measured"], 10**12, "rank 1 held 1000000000000 bytes"),
    "a promise without end": (1, ["peak_bytes", "host", "1", "predicted"], 10**12, "tight promises max(old, new) +"),
    "an axis": (0, ["tensors", 1, "old", "cuts"], [["xp", 0]], "tensors[1].old.cuts[0]"),
    "pp cuts nothing": (0, ["tensors", 1, "old", "cuts"], [["pp", 0]], "tensors[1].old.cuts[0]"),
    "an axis of nothing": (0, ["tensors", 1, "old", "cuts"], [["tp0", 0]], "tensors[1].old.cuts[0]"),
    "ranks cut twice": (0, ["tensors", 1, "new", "cuts"], [["efsdp", 0], ["tp", 0]], "cut over ranks that they share"),
    "an axis twice": (0, ["tensors", 1, "new", "cuts"], [["tp2", 0], ["tp", 0]], "each axis cuts once"),
    "dim 7": (0, ["tensors", 1, "new", "cuts"], [["tp", 7]], "tp cuts dim 7"),
    "a dtype": (0, ["tensors", 0, "tensor", "states", 0, "dtype"], "float3", "states[0].dtype is 'float3'"),
    "no tensors": (0, ["tensors"], [], "has no tensors"),
    "a word for a number": (0, ["ranks_per_node"], "x", "plan.ranks_per_node is 'x'"),
    "no ranks on a node": (0, ["ranks_per_node"], 0, "plan.ranks_per_node is 0"),
    "text in a shape": (0, ["tensors", 0, "tensor", "shape"], ["x"], "shape[0] is 'x'"),
    "a stage too many": (0, ["tensors", 0, "new", "stages"], [1], "stages are [1]; at least one of 0 .. 0"),
    "rounds": (0, ["rounds"], 999, "rounds is 999"),
    "a tensor larger than the world": (0, ["tensors", 0, "tensor", "shape"], [2**50, 2**50], "more bytes than 4 ranks"),
    "members": (0, ["members"], [0, 1, 2, 7], "newcomers are 4, 5, ..."),
    "a mode": (0, ["mode"], "tite", "no mode 'tite'; the modes are keep, tight (nearest: tight)"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_told_by_its_place(tmp_path, name):
    which, place, value, named = DAMAGE[name]
    files = copy.deepcopy(list(SWITCHES["tight"]))
    files[which] = altered(files[which], place, "put", value)
    codes, said = check(tmp_path / "001", *files)
    assert codes <= {0, 3}
    assert 3 in codes
    assert named in said


def test_a_round_too_many_is_found_where_rounds_can_be_derived(tmp_path):
    plan, certificate = copy.deepcopy(SWITCHES["keep"])
    plan["rounds"] += 1
    codes, said = check(tmp_path / "001", plan, certificate)
    assert 3 in codes
    assert "derived anew it is" in said


def test_json_without_end_is_refused(tmp_path):
    codes, said = check(tmp_path / "001", b"[" * 100_000, b"[" * 100_000)
    assert codes == {2, 3}
    assert "is not JSON" in said
