import math
import os
import time
from pathlib import Path

import pytest

from dynatrain.observe.requests import (
    Answer,
    Inbox,
    Request,
    RequestError,
    new_id,
    read_answer,
    submit,
    wait_answer,
)

pytestmark = pytest.mark.clock


def test_requests_are_taken_once_in_the_order_of_their_writing(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    for number, name in enumerate("zay"):
        submit(tmp_path, Request(id=name, verb="stop"))
        os.utime(tmp_path / f"{name}.json", ns=(number, number))
    assert [request.id for request in inbox.new()] == ["z", "a", "y"]
    assert inbox.new() == []


def test_the_same_request_again_leads_to_the_same_answer(tmp_path: Path) -> None:
    wish = Request(id="a", verb="switch", arguments={"layout": "fsdp4"})
    submit(tmp_path, wish)
    inbox = Inbox(tmp_path)
    assert inbox.new() == [wish]
    inbox.answer("a", Answer(outcome="done", switch=1))
    submit(tmp_path, wish)
    assert inbox.new() == []
    assert Inbox(tmp_path).new() == []  # nor by a later agent
    assert wait_answer(tmp_path, "a", 0) == Answer(outcome="done", switch=1)


def test_another_request_under_a_known_id_is_refused(tmp_path: Path) -> None:
    submit(tmp_path, Request(id="a", verb="stop"))
    with pytest.raises(RequestError, match="asks for something else"):
        submit(tmp_path, Request(id="a", verb="switch", arguments={"layout": "dp2"}))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "{}",
        '{"id": 7, "verb": "stop"}',
        '{"id": "x", "verb": ["stop"]}',
        '{"id": "x", "verb": "stop", "arguments": []}',
        '{"id": "x", "verb": "stop", "colour": "red"}',
        '{"id": "x", "verb": "stop", "deadline": "soon"}',
        '{"id": "y", "verb": "stop"}',
        '{"id": "x", "verb": "switch"}',
        "\udcff",
        "[" * 200_000,
        '{"id": "x", "verb": "stop", "deadline": ' + "9" * 5000 + "}",
    ],
)
def test_a_malformed_file_is_answered_refused(tmp_path: Path, text) -> None:
    (tmp_path / "x.json").write_bytes(text.encode(errors="surrogateescape"))
    inbox = Inbox(tmp_path)
    assert inbox.new() == []
    answer = read_answer(tmp_path, "x")
    assert answer.outcome == "refused"
    assert answer.message


def test_a_folder_in_the_place_of_a_request_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    assert Inbox(tmp_path).new() == []
    assert read_answer(tmp_path, "x").outcome == "refused"


def test_a_request_past_its_deadline_is_refused(tmp_path: Path) -> None:
    submit(tmp_path, Request(id="late", verb="stop", deadline=time.time() - 1))
    submit(tmp_path, Request(id="soon", verb="stop", deadline=time.time() + 60))
    assert [request.id for request in Inbox(tmp_path).new()] == ["soon"]
    assert "deadline" in read_answer(tmp_path, "late").message


def test_a_bad_request_lists_all_that_is_wrong() -> None:
    with pytest.raises(
        RequestError, match=r"id '\.\./x'.*verb 'dance': one of lend, park, prepare, .* stop, switch, unpark"
    ):
        Request(id="../x", verb="dance")
    with pytest.raises(RequestError, match="switch needs 'layout'; switch knows no 'layut'; it takes layout, mode"):
        Request(id="a", verb="switch", arguments={"layut": "dp2"})
    with pytest.raises(RequestError, match="id"):
        Request(id="a.answer", verb="stop")
    with pytest.raises(RequestError, match=r"no mode 'tihgt'; the modes are keep, tight, auto \(nearest: tight\)"):
        Request(id="a", verb="switch", arguments={"layout": "dp2", "mode": "tihgt"})
    for never in (math.nan, math.inf):
        with pytest.raises(RequestError, match="deadline"):
            Request(id="a", verb="stop", deadline=never)


def test_what_is_open_when_the_agent_ends_is_answered_failed(tmp_path: Path) -> None:
    submit(tmp_path, Request(id="a", verb="stop"))
    submit(tmp_path, Request(id="b", verb="stop"))
    inbox = Inbox(tmp_path)
    inbox.new()
    inbox.answer("a", Answer(outcome="done"))
    inbox.close("over")
    assert read_answer(tmp_path, "a").outcome == "done"
    assert read_answer(tmp_path, "b") == Answer(outcome="failed", message="over")


def test_waiting_for_an_answer_ends(tmp_path: Path) -> None:
    began = time.monotonic()
    assert wait_answer(tmp_path, new_id(), 0.1) is None
    assert time.monotonic() - began < 2


def test_names_that_no_answer_could_have_are_passed_over_and_told_once(tmp_path: Path, caplog) -> None:
    for name in ("x" * 245, "é" * 60):
        (tmp_path / f"{name}.json").write_text("{}")
    submit(tmp_path, Request(id="a", verb="stop"))
    inbox = Inbox(tmp_path)
    assert [request.id for request in inbox.new()] == ["a"]
    assert inbox.new() == []
    inbox.close("over")
    assert read_answer(tmp_path, "a").message == "over"
    assert caplog.text.count("an id has at most 100 letters; the run goes on") == 2


def test_a_folder_that_cannot_be_read_ends_no_agent(tmp_path: Path, caplog) -> None:
    inbox = Inbox(tmp_path / "gone")
    assert inbox.new() == inbox.new() == []
    inbox.close("over")
    assert caplog.text.count("requests are not read") == 1


def test_an_answer_that_the_disk_does_not_take_is_told_and_written_later(tmp_path: Path, caplog, monkeypatch) -> None:
    full = [True]

    def fsync(_: int) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fsync)
    (tmp_path / "a.json").write_text(Request(id="a", verb="stop").to_json())
    inbox = Inbox(tmp_path)
    assert len(inbox.new()) == 1
    inbox.answer("a", Answer(outcome="done"))
    assert inbox.new() == []
    assert caplog.text.count("answer to request a is not written: [Errno 28]") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"], "no draft is left"
    full[0] = False
    inbox.close("over")
    assert read_answer(tmp_path, "a").outcome == "done", "and not failed"
    assert Inbox(tmp_path).new() == []
