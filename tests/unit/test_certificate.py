import json
from dataclasses import replace

import pytest

from dynatrain.judge.certificate import (
    Bytes,
    Cause,
    Certificate,
    Digest,
    Peak,
    PeakBytes,
    Replicas,
    Seconds,
    World,
    check_certificate,
)
from dynatrain.judge.verdict import Coverage

GOOD = Certificate(
    run_id="r1",
    switch=1,
    generation=0,
    step=40,
    from_="fsdp4",
    to="fsdp2.tp2",
    world=World(old=4, new=4),
    cause=Cause(verb="switch", by="cli", request_id="7"),
    mode="keep",
    outcome="committed",
    plan_hash="00ff00ff00ff00ff",
    coverage={"param": Coverage(expected=100, written=100), "step": Coverage(expected=8, written=8)},
    replicas=Replicas(groups=2, checked=4, unequal=0),
    digest=Digest(
        algorithm="weighted-sum",
        before={"param": "0" * 16, "step": "1" * 16},
        after={"param": "0" * 16, "step": "1" * 16},
        equal=True,
    ),
    bytes=Bytes(moved=60, relaid=40, adopted=8),
    seconds=Seconds(build=0.1, warm=0.1, quiesce=0.0, move=0.2, check=0.1, compile=0.0, commit=0.0, stall=0.3),
    floor_seconds=0.1,
    peak_bytes=PeakBytes(device={}, host={0: Peak(predicted=10, measured=9), 3: Peak(predicted=10, measured=None)}),
    transport="gloo",
    versions={"dynatrain": "0.1.0", "python": "3.11.9", "torch": "2.13.0"},
)


def record(**changes):
    return json.loads(replace(GOOD, **changes).to_json())


def test_a_certificate_survives_its_text():
    assert Certificate.from_json(GOOD.to_json()) == GOOD
    assert check_certificate(record()) == ()


def test_what_came_before_the_first_step_says_so_and_an_earlier_versions_record_is_read():
    first = replace(GOOD, step=-1)
    assert Certificate.from_json(first.to_json()) == first
    assert check_certificate(record(schema=2)) == ()


def test_the_record_has_the_fields_of_the_design_under_their_names():
    assert list(record()) == [
        "schema",
        "run_id",
        "switch",
        "generation",
        "step",
        "from",
        "to",
        "world",
        "cause",
        "mode",
        "outcome",
        "plan_hash",
        "coverage",
        "replicas",
        "digest",
        "bytes",
        "seconds",
        "lost_seconds",
        "floor_seconds",
        "peak_bytes",
        "transport",
        "versions",
        "attempt",
    ]


@pytest.mark.parametrize("key", list(record()))
def test_a_record_without_a_field_is_refused_by_its_name(key):
    less = record()
    del less[key]
    assert check_certificate(less) == (f"certificate lacks {key!r}",)
    with pytest.raises(ValueError, match=f"lacks '{key}'"):
        Certificate.from_json(json.dumps(less))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {
                "coverage": {
                    "param": Coverage(expected=108, written=100, missing=8),
                    "step": Coverage(written=8, expected=8),
                }
            },
            "param is not covered exactly once",
        ),
        (
            {
                "coverage": {
                    "param": Coverage(expected=90, written=100, twice=10),
                    "step": Coverage(written=8, expected=8),
                }
            },
            "param is not covered exactly once",
        ),
        (
            {"coverage": {"param": Coverage(expected=108, written=100), "step": Coverage(written=8, expected=8)}},
            "expected + twice is not written + missing",
        ),
        ({"coverage": {}, "bytes": Bytes(moved=0, relaid=0, adopted=0)}, "coverage names no state"),
        ({"coverage": {"param": Coverage(expected=108, written=108)}}, "['step'] are in only one"),
        ({"replicas": Replicas(groups=2, checked=4, unequal=1)}, "1 replicas are unequal"),
        ({"replicas": Replicas(groups=2, checked=4, unequal=2, mended=1)}, "1 replicas are unequal"),
        ({"replicas": Replicas(groups=2, checked=4, unequal=1, mended=2), "outcome": "failed"}, "more were mended"),
        ({"replicas": Replicas(groups=2, checked=0, unequal=1), "outcome": "failed"}, "more are unequal"),
        ({"digest": replace(GOOD.digest, after={"param": "2" * 16, "step": "1" * 16})}, "equal is True, but"),
        ({"digest": replace(GOOD.digest, equal=False)}, "equal is False, but"),
        ({"digest": replace(GOOD.digest, after={}, equal=False)}, "digests before and after are not equal"),
        ({"bytes": Bytes(moved=61, relaid=40, adopted=8)}, "add up to 109, but coverage says 108"),
        ({"seconds": replace(GOOD.seconds, commit=None)}, "phases ['commit'] have no seconds"),
        ({"versions": {"dynatrain": "0.1.0"}}, "versions lacks ['python', 'torch']"),
        ({"peak_bytes": PeakBytes(device={}, host={4: Peak(predicted=1, measured=1)})}, "ranks ['4'] outside"),
        (
            {
                "peak_bytes": PeakBytes(device={}, host=dict.fromkeys((4, 8), Peak(predicted=1, measured=1))),
                "cause": Cause(verb="scale", by="cli", request_id="7"),
            },
            "ranks ['8'] outside a world of 8",
        ),
        ({"from_": "zzz"}, "from is not a layout: 'zzz'"),
        ({"to": "fsdp2"}, "to is fsdp2, of 2 ranks, but world.new is 4"),
        ({"mode": "auto"}, "the mode is auto: it was never decided"),
        ({"mode": "loose"}, "certificate.mode is 'loose'"),
        ({"outcome": "perhaps"}, "certificate.outcome is 'perhaps'"),
        ({"schema": 1}, "certificate.schema is 1"),
        ({"plan_hash": "xyz"}, "certificate.plan_hash is 'xyz'"),
        ({"step": -2}, "certificate.step is -2"),
        ({"step": -1, "schema": 2}, "certificate.step is -1, which schema 2 has not"),
        ({"lost_seconds": -0.5}, "certificate.lost_seconds is -0.5"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(changes, problem):
    found = check_certificate(record(**changes))
    assert any(problem in text for text in found), found


def test_after_a_loss_alone_some_bytes_may_have_come_from_files():
    loss = {"cause": Cause(verb="loss", by="loss", request_id="")}
    assert check_certificate(record(bytes=Bytes(moved=10, relaid=0, adopted=0), **loss)) == ()
    assert check_certificate(record(bytes=Bytes(moved=110, relaid=0, adopted=0), **loss)) != ()
    assert check_certificate(record(bytes=Bytes(moved=10, relaid=0, adopted=0))) != ()


def test_an_aborted_switch_need_not_have_come_to_its_digests():
    aborted = record(
        outcome="aborted",
        digest=replace(GOOD.digest, after={}, equal=False),
        seconds=Seconds(build=0.1),
        floor_seconds=None,
    )
    assert check_certificate(aborted) == ()
    assert check_certificate(aborted | {"mode": "auto"}) == ()


@pytest.mark.parametrize("junk", [None, [], "x", 3, {"schema": 1}, record() | {"bytes": 3}, record() | {"extra": 1}])
def test_what_is_no_record_is_refused_without_an_error(junk):
    assert check_certificate(junk)
