"""The executor in real processes, over gloo and through memory: right place, killed, stopped and failing peers."""

import itertools
import os
import signal
import time

import pytest
import torch
from tests.doubles import LateTransport
from tests.ranks import run
from tests.stamped import Rank, job, owns, plans, schedule

from dynatrain.execute import attach, memory
from dynatrain.execute.exchange import CorruptMove
from dynatrain.execute.memory import Nearest
from dynatrain.execute.rounds import RoundRefused, backward
from dynatrain.execute.transport import GroupTransport, Message, TransportError

nearest = Nearest()

JOB = job()
DEADLINE = 20.0
"""Seconds that ranks would wait for one that nobody told them of."""


class Spoiling:
    """Flips one bit of the first message that arrives."""

    def __init__(self, inner):
        self.inner, self.size, self.name, self.direct = inner, inner.size, inner.name, inner.direct
        self.close, self.fresh = inner.close, True

    def post(self, sends, receives):
        first, self.fresh = receives if self.fresh else [], self.fresh and not receives
        return SpoilingPending(self.inner.post(sends, receives), first[:1])


class SpoilingPending:
    def __init__(self, pending, spoiled):
        self.pending, self.spoiled = pending, spoiled

    def wait(self, timeout_seconds, arrived=lambda _message: None):
        def spoil(message):
            if any(message is one for one in self.spoiled):
                message.tensor[-1] ^= 1
            arrived(message)

        self.pending.wait(timeout_seconds, spoil)


TRANSPORTS = {"gloo": GroupTransport, "memory": nearest}

by_each = pytest.mark.parametrize("by", TRANSPORTS)


def member(world, ends, mode, name, by, *, wrap=lambda transport: transport, hook=None):
    """This process as one rank of a switch, not yet run."""
    old, new = (owns(JOB, text) for text in ends)
    plan = plans(JOB, old, new, world.size, schedule(JOB, mode, per_round=20))[world.rank]
    transport = TRANSPORTS[by](world.group(name), range(world.size))
    assert transport.name == by
    transport = wrap(transport)
    rank = Rank(JOB, old, new, plan, transport, lambda number: world.vote(f"{name}/{number}", yes=True))
    if hook:
        rank.executor._hook = hook
    return rank


def outcome(world, rank, name, seconds=8):
    """How the run ended, after how long, and with the old pieces intact or not."""
    began = time.monotonic()
    try:
        rank.executor.run(seconds)
    except (TransportError, CorruptMove, RoundRefused, InterruptedError) as error:
        world.vote(f"{name}/{rank.executor.journal.agreed}", yes=False)
        return type(error).__name__, time.monotonic() - began, getattr(error, "peers", None) or str(error)
    return "done", time.monotonic() - began, ""


@pytest.mark.parametrize("ends", [("fsdp4", "fsdp2.tp2"), ("pp2.tp2", "dp2.fsdp2"), ("tp4", "fsdp3")], ids="-".join)
def test_every_transport_also_as_late_as_it_may_be_puts_everything_in_its_place(ends):
    new = owns(JOB, ends[1])

    def work(world):
        wrong = []
        for mode, by in itertools.product(("keep", "tight"), TRANSPORTS):
            for name, wrap in (("in time", lambda t: t), ("late", lambda t: LateTransport(t, world.rank))):
                rank = member(world, ends, mode, f"{mode}/{by}/{name}", by, wrap=wrap)
                rank.executor.run(20)
                wrong += rank.misplaced(new, rank.executor.new)
        return wrong

    assert run(4, work) == [[]] * 4


@by_each
@pytest.mark.parametrize("event", ["round_start", "posted", "received"])
def test_a_killed_peer_is_an_error_on_all_others_within_seconds(event, by):
    def work(world):
        def hook(seen, number):
            if (seen, number, world.rank) == (event, 1, 2):
                os.kill(os.getpid(), signal.SIGKILL)

        rank = member(world, ("fsdp4", "pp2.tp2"), "keep", "kill", by, hook=hook)
        found = outcome(world, rank, "kill")
        return found[0], found[1] < 5, rank.misplaced(owns(JOB, "fsdp4"), rank.old)

    results = run(4, work)
    assert results[2] is None
    for rank in (0, 1, 3):
        kind, quick, wrong = results[rank]
        assert kind in {"TransportError", "RoundRefused"} if event == "received" else kind == "TransportError"
        assert (quick or event == "received", wrong) == (True, [])


@by_each
def test_a_stopped_peer_is_named_at_the_deadline(by):
    def work(world):
        def hook(seen, number):
            if (seen, number, world.rank) == ("posted", 0, 1):
                os.kill(os.getpid(), signal.SIGSTOP)

        return outcome(world, member(world, ("fsdp4", "tp4"), "keep", "stop", by, hook=hook), "stop", seconds=2)

    results = run(4, work, silent=[1])
    for rank in (0, 2, 3):
        kind, seconds, _ = results[rank]
        assert kind == "TransportError"
        assert seconds < 4
    assert any(results[rank][2] == (1,) for rank in (0, 2, 3))


@by_each
def test_a_failing_rank_frees_the_others_and_tight_goes_back_on_a_new_group(by):
    ends, rounds = ("fsdp4", "pp2.tp2"), schedule(JOB, "tight", per_round=20)
    old, new = (owns(JOB, text) for text in ends)

    def work(world):
        failed = []

        def hook(seen, number):
            if (seen, number, world.rank) == ("posted", 1, 3):
                failed.append(time.monotonic())
                raise InterruptedError

        rank = member(world, ends, "tight", "ahead", by, hook=hook)
        found = outcome(world, rank, "ahead", DEADLINE)
        freed = time.monotonic()
        rank.executor._hook = lambda _event, _round: None
        back = plans(JOB, new, old, 4, backward(rounds, 1))[world.rank]
        way = rank.executor.way_back(
            plan=back,
            transport=TRANSPORTS[by](world.group("back"), range(4)),
            agreed=1,
            agree=lambda number: world.vote(f"back/{number}", yes=True),
        )
        way.run(10)
        return found[0], rank.misplaced(old, rank.old), failed, freed

    results = run(4, work, 2 * DEADLINE)
    # A rank that was waiting for nothing of the one that failed hears of it by the vote.
    assert {result[0] for result in results[:3]} <= {"TransportError", "RoundRefused"}
    assert "TransportError" in {result[0] for result in results[:3]}
    assert results[3][0] == "InterruptedError"
    assert [result[1] for result in results] == [[]] * 4
    # One clock for all processes. How long a rank took to come that far is the machine's affair.
    (failed,) = results[3][2]
    assert max(result[3] for result in results) - failed < DEADLINE / 2


@by_each
def test_one_flipped_bit_on_the_way_names_the_move(by):
    def work(world):
        wrap = Spoiling if world.rank == 2 else lambda transport: transport
        return outcome(world, member(world, ("fsdp4", "fsdp2.tp2"), "keep", "flip", by, wrap=wrap), "flip")

    results = run(4, work)
    assert results[2][0] == "CorruptMove"
    assert "rank 2 holds other bytes than rank" in results[2][2]
    assert {results[rank][0] for rank in (0, 1, 3)} <= {"RoundRefused", "TransportError"}


@by_each
def test_closing_ends_the_waits_of_peers_and_of_our_own_threads(by):
    def work(world):
        transport = TRANSPORTS[by](world.group("close"), range(3))
        began = time.monotonic()
        if world.rank == 0:
            time.sleep(0.3)
            transport.close()
            transport.close()
            return "closed"
        pending = transport.post([], [Message(0, torch.zeros(8))])
        try:
            pending.wait(15)
        except TransportError as error:
            return error.peers, time.monotonic() - began < 5
        return "came"

    assert run(3, work) == ["closed", ((0,), True), ((0,), True)]


@by_each
def test_plan_ranks_may_be_numbered_otherwise_than_the_group(by):
    def work(world):
        numbers = [7, 3, 5]
        transport = TRANSPORTS[by](world.group("numbers"), numbers)
        mine, peer, before = numbers[world.rank], numbers[(world.rank + 1) % 3], numbers[world.rank - 1]
        got = torch.zeros(1)
        transport.post([Message(peer, torch.tensor([float(mine)]))], [Message(before, got)]).wait(10)
        return got.item() == before

    assert run(3, work) == [True] * 3


def test_ranks_that_may_not_read_each_other_use_the_wire_and_those_that_may_do_not():
    """Of four ranks, 0 and 1 see each other, and 2 can be read by nobody, as in a container that forbids it."""

    def work(world):
        if world.rank == 3:
            memory.machine = lambda: 3
        ask = attach._LIBC.process_vm_readv
        forbidden = world.store
        forbidden.set(f"process/{world.rank}", str(os.getpid()))
        closed = int(forbidden.get("process/2"))

        class Guarded:
            prctl = staticmethod(lambda *_: 0)

            @staticmethod
            def process_vm_readv(process, *more):
                return -1 if process == closed else ask(process, *more)

        attach._LIBC = Guarded
        transport = nearest(world.group("mixed"), range(4))
        near = [peer for peer in range(4) if peer != world.rank and transport.direct(peer)]
        ends = ("fsdp4", "fsdp2.tp2")
        plan = plans(JOB, *(owns(JOB, text) for text in ends), 4, schedule(JOB, "keep", per_round=20))[world.rank]
        rank = Rank(JOB, *(owns(JOB, text) for text in ends), plan, transport, lambda _round: True)
        rank.executor.run(20)
        return transport.name, near, rank.misplaced(owns(JOB, ends[1]), rank.executor.new)

    assert run(4, work) == [
        ("memory, gloo", [1], []),
        ("memory, gloo", [0], []),
        ("gloo", [], []),
        ("gloo", [], []),
    ]
