"""Who is who in a crossing, what its newcomers are told, and what a new rank 0 takes over."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from dynatrain.cluster.board import Board
from dynatrain.cluster.crossing import Crossing
from dynatrain.cluster.worlds import crossing_board, forget_others, world_board
from dynatrain.execute.pieces import Pool
from dynatrain.judge.certificate import check_certificate
from dynatrain.layout.text import parse_layout
from dynatrain.observe.run import RunFolder
from dynatrain.space.ownership import Ownership, Placement
from dynatrain.space.tensor import State, Tensor
from dynatrain.train.account import Account
from dynatrain.train.announcement import Announcement, NotAdmittedError
from dynatrain.train.order import Order
from dynatrain.train.record import SETTLED, Recorder
from dynatrain.train.states import Form
from dynatrain.train.streams import Streams
from dynatrain.train.targets import whole_world
from dynatrain.train.turns import Turns
from dynatrain.train.wishes import Wishes

CROSSING = Crossing(generation=7, old=(4, 0, 9), new=(9, 12, 4, 11))


def test_holders_are_the_old_ranks_and_then_the_newcomers_in_the_order_of_their_new_ranks():
    assert CROSSING.holders == (4, 0, 9, 12, 11)
    assert list(CROSSING.newcomers) == [3, 4]
    assert CROSSING.over == (2, 3, 0, 4)
    assert [CROSSING.rank(member) for member in CROSSING.holders] == [2, -1, 0, 1, 3]


ORDER = Order(layout="fsdp2", members=(0, 5), generation=3, turn=4, number=2, verb="scale", by="test", mode="keep")
STATES = State("param", "float32"), State("factor", "float32", reduced=(1,)), State("ema.shadow", "float32")
TOLD = Announcement(
    order=ORDER,
    old=(0, 1),
    catalogue=(Tensor("a.weight", (6, 4), (("tp2", 1), ("fsdp", 0)), (0,), STATES, "a", within="ab"),),
    ownership=Ownership(
        parse_layout("tp2"), {"a.weight": Placement((("tp", 1),), (0,), spans=((0, 4, 4, 0), (4, 6, 2, 2)))}
    ),
    forms={"ema.shadow": Form("ema", ("shadow",), "", canonical=True, plain=False)},
    seconds=1.5,
)


def test_an_announcement_is_read_as_it_was_put_up():
    board = crossing_board(HashStore(), 3, 3)
    TOLD.put_up(board)

    assert Announcement.wait(board, 3) == TOLD
    assert TOLD.crossing == Crossing(generation=3, old=(0, 1), new=(0, 5))


def test_who_waits_for_a_crossing_that_was_given_up_is_not_admitted():
    board = crossing_board(HashStore(), 3, 3)
    board.give_up(3, "member 5 died")

    with pytest.raises(NotAdmittedError, match="member 5 died"):
        Announcement.wait(board, 3)


def test_a_new_rank_0_takes_over_what_is_asked_and_what_was_seen():
    board = Board(HashStore(), 2)
    asked = {"verb": "switch", "by": "cli", "id": "x", "arguments": {"layout": "tp2"}}
    board.publish(json.dumps(asked))
    one = Wishes(board, {8: "dp2", 30: "tp2"}, "keep", every=5)
    one.begun(0)
    first = next(one.due(7))
    other = Wishes(board, {8: "dp2", 30: "tp2"}, "keep", every=5)

    other.take_over(json.loads(json.dumps(one.state())))

    assert (first.at, first.layout) == (8, "dp2")
    assert list(other.due(7)) == list(one.due(7)) != []
    assert other.state() == one.state()


def test_a_loop_without_an_agent_refuses_a_crossing_by_name_and_an_agent_s_run_refuses_its_own_world():
    def answers(worlds, order):
        board = Board(HashStore(), 2)
        party = SimpleNamespace(rank=0, world_size=2, members=(0, 1), worlds=worlds, board=board, memory=Pool())
        board.publish(json.dumps({"verb": order.verb, "arguments": {**asdict(order), "layout": order.layout}}))
        here = parse_layout("fsdp2")
        idle, here_too = SimpleNamespace(busy=False), SimpleNamespace(parked=False)
        turns = Turns(party, Wishes(board, {}, "keep"), whole_world, lambda: here, idle, here_too, 0)
        return turns.take(0, 0), json.loads(board.take_answer(0) or "{}").get("message", "")

    none, why = answers(None, ORDER)
    assert none is None
    assert "this loop has one world alone" in why
    assert answers(object(), replace(ORDER, members=(0, 1)))[1] == "the layout is fsdp2 already"
    wrong = answers(object(), replace(ORDER, layout="fsdp3"))[1]
    assert "3 ranks, the world has 2" in wrong
    taken, why = answers(object(), ORDER)
    assert (taken.members, taken.generation, taken.number, taken.turn, why) == ((0, 5), 3, 1, 1, "")


def test_an_account_is_read_as_it_was_told_and_what_could_not_be_read_is_named():
    account = Account(
        step=4,
        layout="dp1",
        common={"ema": {"taken": 3, "scale": torch.tensor(2.0)}},
        groups=[{"lr": 0.1, "params": ["a"]}],
        optimizers={"optimizer Lion": {"t": 4}},
        streams=Streams.read(torch.device("cpu")).state(),
    )
    read = Account.from_text(account.to_text())

    assert (read.step, read.common, read.groups) == (4, account.common, account.groups)
    assert read.optimizers == account.optimizers
    assert Streams.of(read.streams).same(Streams.of(account.streams))
    with pytest.raises(ValueError, match="the state of odd could not be read back"):
        Account(
            step=0, layout="", common={"odd": {"thing": Wishes}}, groups=[], optimizers={}, streams={}
        ).require_readable()


def test_boards_of_worlds_that_are_over_are_forgotten():
    run = PrefixStore("run", HashStore())
    run.set("beat/1", "")
    for generation in range(4):
        world_board(run, generation, 2).post("turn/1", "")
        crossing_board(run, generation, 2).post("warm/2", "")

    forget_others(run, 1, 3)

    here = [
        key
        for key in ("world/0/turn/1", "world/1/turn/1", "crossing/2/warm/2", "crossing/3/warm/2", "beat/1")
        if run.check([key])
    ]
    assert here == ["world/1/turn/1", "crossing/3/warm/2", "beat/1"]


def test_a_newcomer_has_lost_no_seconds(tmp_path):
    told = []
    board = SimpleNamespace(vote=lambda *vote: told.append(vote), leave=lambda _topic: None)
    recorder = Recorder(RunFolder(tmp_path), board, rank=2, generation=3, attempt=0, rates=None)
    recorder.ended(SimpleNamespace(order=ORDER), "committed", "", 5, {})
    for step in range(SETTLED):
        recorder.step_ended(1000.0 + step)

    assert told == [("s2/lost", 2, 0.0)]


def test_a_certificate_of_a_crossing_says_both_worlds_and_the_generation(tmp_path):
    folder = RunFolder.create(tmp_path / "run", config="", environment={})
    recorder = Recorder(folder, Board(HashStore(), 2), rank=1, generation=0, attempt=0, rates=None)
    crossing = Crossing(generation=3, old=(0, 1), new=(1, 5, 6))
    attempt = SimpleNamespace(
        order=ORDER,
        way=SimpleNamespace(crossing=crossing),
        blueprint=None,
        report=None,
        seconds={"build": 0.5},
        carried_by="gloo",
        party=SimpleNamespace(device=torch.device("cpu"), world_size=4),
        old=SimpleNamespace(layout=parse_layout("fsdp2")),
        mended=0,
        target=parse_layout("fsdp3"),
    )

    recorder.enter(Board(HashStore(), 3), 0, 3)
    recorder.ended(attempt, "aborted", "", 5, {})

    record = json.loads((folder.switch(2) / "certificate.json").read_text())
    assert record["world"] == {"old": 2, "new": 3}
    assert record["generation"] == 3
    assert check_certificate(record) == ()
