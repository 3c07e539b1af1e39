"""Agents that have lost the one that leads: who leads then, where the ranks are, and that two never lead. No ranks."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dynatrain.cluster.board import Board
from dynatrain.cluster.heirs import CUT_OFF_SECONDS, SILENT_SECONDS, Sign, brought, fate, seated
from dynatrain.cluster.interrupts import Interrupts
from dynatrain.cluster.meeting import Job, Meeting, RunFailedError, contexts
from dynatrain.cluster.place import Place, PlaceError
from dynatrain.cluster.store import host_store
from dynatrain.cluster.succession import Heir, heir_of, succeed
from dynatrain.cluster.tenure import Tenure
from dynatrain.cluster.tie import Tie, nobody_listens
from dynatrain.observe.address import Address
from dynatrain.observe.log import Tail
from dynatrain.observe.mark import AgentMark, Lease
from dynatrain.observe.requests import Request, read_answer, submit
from dynatrain.observe.run import RunFolder

pytestmark = pytest.mark.clock

ATTEMPT = 3


def sign(**about) -> Sign:
    return replace(Sign(attempt=ATTEMPT, exit=None, ended=False, silent=0.0, waited=0.0), **about)


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        (sign(), "open"),
        (sign(ended=True), "gone"),
        (sign(silent=SILENT_SECONDS), "gone"),
        (sign(waited=CUT_OFF_SECONDS), "lives"),
        (sign(waited=CUT_OFF_SECONDS, silent=SILENT_SECONDS), "gone"),
        (sign(exit=75, ended=True), "over"),
        (sign(exit=0), "over"),
        (sign(attempt=ATTEMPT + 1, ended=True), "followed"),
        (sign(attempt=ATTEMPT + 1, exit=0), "followed"),
    ],
)
def test_the_agent_that_led_is_gone_when_it_has_ended_or_gives_no_sign_and_else_keeps_the_run(seen, word) -> None:
    assert fate(seen, ATTEMPT) == word


def resize(present: str, size: int, named: str) -> str:
    if size == 3:
        raise ValueError("3 ranks: nearest: 2")
    return named or f"{present[:2]}{size}"


def test_ranks_keep_their_places_and_as_many_stay_as_have_a_layout() -> None:
    found = seated(2, {1: (0, 1), 2: (1, 2), 5: ()}, "dp6", 6, resize)
    assert (found.nodes, found.layout) == ({2: 0, 1: 1, 5: 2}, "dp4")
    assert [(one.member, one.node, one.slot) for one in found.seats] == [(0, 0, 1), (1, 0, 2), (2, 1, 0), (3, 1, 1)]
    fewer = seated(1, {1: (0, 1), 2: (0,)}, "dp4", 4, resize)
    assert (fewer.layout, [one.node for one in fewer.seats]) == ("dp2", [0, 0])
    assert len(seated(1, {1: (0, 1, 2, 3, 4)}, "dp2", 2, resize).seats) == 2, "spares make the world no larger"


def test_hosts_that_were_kept_as_places_take_the_ranks_where_no_others_are_left() -> None:
    assert brought({1: (0,), 2: ()}, None, 4) == {1: (0,), 2: ()}
    assert brought({1: (), 2: ()}, None, 3) == {1: range(2), 2: range(2)}
    assert brought({1: (), 2: ()}, {1: 4, 2: 1}, 3) == {1: range(4), 2: range(1)}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """A run whose agent was killed."""
    run = RunFolder.create(tmp_path / "run", config="", environment={})
    replace(AgentMark.mine(ATTEMPT), started=1).write(run.path)
    Address(host="127.0.0.1", port=1, secret="s", attempt=ATTEMPT).write(run.path)  # noqa: S106 - nobody listens there
    return run


def test_of_many_that_take_a_run_over_one_succeeds_and_none_does_where_it_has_ended(run) -> None:
    with ThreadPoolExecutor(8) as pool:
        marks = list(pool.map(lambda _: run.succeed(ATTEMPT), range(8)))
    (mark,) = filter(None, marks)
    assert mark.attempt == ATTEMPT + 1
    assert run.succeed(ATTEMPT) is None
    run.release(mark, 0)
    assert run.succeed(ATTEMPT + 1) is None


def test_whoever_was_halted_sees_at_its_first_look_that_it_was_followed(run) -> None:
    mark = replace(AgentMark.mine(ATTEMPT), started=1)
    lease = Lease(run.path, mark)
    assert lease.look() == ""
    run.succeed(ATTEMPT)
    assert f"process {os.getpid()}" in lease.look()
    lease.close()


def test_what_was_asked_goes_on_being_asked_but_for_what_names_ranks_or_hosts(run) -> None:
    for name, arguments in (("size", {"size": 2}), ("rank", {"leave": [1]}), ("host", {"nodes": [1]})):
        submit(run.requests, Request(id=name, verb="scale", arguments=arguments))
    tenure = Tenure(run)
    assert tenure.succeed(ATTEMPT)
    assert not Tenure(run).succeed(ATTEMPT)
    assert read_answer(run.requests, "size") is None
    assert {read_answer(run.requests, name).outcome for name in ("rank", "host")} == {"refused"}
    tenure.close(0)
    assert run.agent().exit == 0
    assert read_answer(run.requests, "size").outcome == "failed"


def heir(run: RunFolder, node: int, nodes=(1, 2), slots=(0,), **about) -> tuple[Job, Heir]:
    """What node ``node`` of a run with a rank each goes on with."""
    store = host_store()  # the dead agent's own is nowhere
    job = Job(
        run=run,
        attempt=ATTEMPT,
        place=Place(node=node, nodes=3, host="127.0.0.1", port=1, nonce="run"),
        world_size=3,
        layout="dp3",
        resize=resize,
        device="cpu",
        liveness_seconds=5.0,
        grace_seconds=0.0,
        leave_seconds=1.0,
        drain_seconds=1.0,
        announce=lambda _: None,
        tenure=Tenure(run),
        secret="s",  # noqa: S106
        take_up=lambda _, layout: f"in {layout}",
        **about,
    )
    meeting = Meeting(
        store=store,
        run=store,
        board=Board(store, 3),
        world_size=3,
        devices={},
        device="cpu",
        backend="gloo",
        realtime=False,
        attempt=ATTEMPT,
        note="",
    )
    told = {"nodes": (0, *nodes), "slots": slots, "world_size": 3, "layout": "dp3", "here": "127.0.0.1"}
    return job, heir_of(job, meeting, **told)


def go_on(*heirs: tuple[Job, Heir], late: float = 0.0) -> list:
    """What comes of each, all at once, the last ``late`` seconds later: an error, an exit code, or job and meeting."""

    def one(found):
        if found is heirs[-1]:
            time.sleep(late)
        try:
            return succeed(*found, Interrupts())
        except RunFailedError as error:
            return error

    with ThreadPoolExecutor(len(heirs)) as pool:
        return list(pool.map(one, heirs))


def test_the_lowest_node_leads_and_seats_all_that_come_in_the_next_attempt(run) -> None:
    heirs = [heir(run, 2), heir(run, 1)]
    found = go_on(*heirs, late=0.4)
    places = [job.place for job, _ in found]
    assert [(place.node, place.nodes, place.hosts_store) for place in places] == [(1, 2, False), (0, 2, True)]
    assert {(job.attempt, job.layout, job.world_size) for job, _ in found} == {(ATTEMPT + 1, "dp2", 2)}
    told = [[(one.rank, one.store_port) for one in contexts(*both, both[1].seats, range(2))] for both in found]
    port = Address.read(run.path).port
    assert told == [[(1, port)], [(0, port)]]
    found[1][1].board.post("a", "b")
    assert found[0][1].board.peek("a") == "b", "one store"
    (event,) = (line for line in Tail(run.events).new() if line["kind"] == "succession")
    assert (event["attempt"], event["layout"], event["note"]) == (ATTEMPT + 1, "dp2", "in dp2")
    heirs[1][0].tenure.close(0)


def test_where_the_lowest_is_lost_as_well_the_next_one_leads_alone(run, monkeypatch) -> None:
    monkeypatch.setattr("dynatrain.cluster.succession.GATHER_SECONDS", 0.3)
    ((job, meeting),) = go_on(heir(run, 2))
    assert (job.place.node, job.place.nodes, [seat.node for seat in meeting.seats]) == (0, 1, [0])
    job.tenure.close(0)


def test_where_the_next_lead_is_lost_before_it_says_where_it_is_the_others_go_on(run, monkeypatch) -> None:
    monkeypatch.setattr("dynatrain.cluster.succession.GATHER_SECONDS", 0.3)
    replace(AgentMark.mine(ATTEMPT + 1), started=1).write(run.path)
    ((job, _),) = go_on(heir(run, 2))
    assert job.attempt == ATTEMPT + 2
    job.tenure.close(0)


def test_where_no_layout_is_left_all_end_with_the_reason(run) -> None:
    def never(*_) -> str:
        raise ValueError("no ranks: at least 9")

    heirs = [(replace(job, resize=never), brings) for job, brings in (heir(run, 1), heir(run, 2))]
    found = go_on(*heirs)
    assert all("no ranks: at least 9" in str(error) for error in found), found
    heirs[0][0].tenure.close(3)
    assert go_on(heir(run, 1)) == [3], "who comes later finds how the run has ended"


def test_who_is_cut_off_from_a_lead_that_lives_ends_and_takes_nothing(run, monkeypatch) -> None:
    monkeypatch.setattr("dynatrain.cluster.heirs.CUT_OFF_SECONDS", 2.0)
    mark = replace(AgentMark.mine(ATTEMPT), host="another")
    mark.write(run.path)
    lease = Lease(run.path, mark)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        job, brings = heir(run, 1)
        brings = replace(brings, legacy=replace(brings.legacy, port=listener.getsockname()[1]))
        (error,) = go_on((job, brings))
    assert "lives, and this host is cut off" in str(error)
    assert run.agent() == mark
    lease.close()


def test_a_lead_that_is_halted_elsewhere_is_gone_when_its_lease_does_not_move(run, monkeypatch) -> None:
    monkeypatch.setattr("dynatrain.cluster.heirs.SILENT_SECONDS", 1.0)
    replace(AgentMark.mine(ATTEMPT), host="another").write(run.path)
    (run.path / "agent.lease").touch()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        job, brings = heir(run, 1, nodes=(1,))
        brings = replace(brings, legacy=replace(brings.legacy, port=listener.getsockname()[1]))
        began = time.monotonic()
        ((after, _),) = go_on((job, brings))
    assert after.attempt == ATTEMPT + 1
    assert time.monotonic() - began >= 1.0
    job.tenure.close(0)


def test_a_store_that_ends_is_known_at_once_and_nobody_waits_in_it_any_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        assert not nobody_listens(host, port)
        tie = Tie(host, port, patience=60)
        theirs, _ = listener.accept()  # the look
        theirs, _ = listener.accept()
        with socket.create_connection((host, port)) as other:
            assert tie.wait(0.3) == ""
            theirs.close()
            assert tie.wait(2.0) == "its connection was closed"
            other.settimeout(2.0)
            assert other.recv(1) == b""
    assert nobody_listens(host, port)
    tie.close()
    with pytest.raises(PlaceError, match="cannot be reached"):
        Tie(host, port, patience=60)


def test_a_store_that_does_not_answer_is_given_up_and_who_hangs_in_it_comes_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tie = Tie(*listener.getsockname(), patience=0.6)
        other = socket.create_connection(listener.getsockname())
        out = threading.Event()
        threading.Thread(target=lambda: (other.recv(1), out.set()), daemon=True).start()
        for _ in range(5):
            assert tie.wait(0.2) == ""
            tie.answered()
        assert "has not answered for 0.6 s" in tie.wait(3.0)
        assert out.wait(2.0)
        tie.close()
        other.close()
