"""The executor on many ranks in one process, every element stamped with its address, every target poisoned."""

import dataclasses
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests import stamped
from tests.doubles import Hub, LateTransport, LocalTransport
from tests.stamped import Ballot, Rank, everywhere, granules, job, local, owns, plans, schedule

from dynatrain.execute import exchange, wire
from dynatrain.execute.exchange import CorruptMove
from dynatrain.execute.memory import MemoryTransport
from dynatrain.execute.rounds import RoundRefused
from dynatrain.execute.transport import Message, TransportError
from dynatrain.plan.build import rank_plan
from dynatrain.space.box import volume
from dynatrain.space.ownership import num_holders
from dynatrain.space.tensor import ITEMSIZE

JOB = job()
FOUR = ["dp4", "fsdp4", "dp2.fsdp2", "tp4", "fsdp2.tp2", "dp2.tp2", "pp4", "pp2.fsdp2", "pp2.tp2"]
OTHER = ["fsdp3", "fsdp2", "dp1", "tp3.fsdp2", "pp2.dp2.tp2", "fsdp8", "pp3.tp2"]


@pytest.fixture(autouse=True)
def _small_bundles(monkeypatch):
    """Many bundles, frames of both kinds, and items cut inside a row, on a small job."""
    monkeypatch.setattr(wire, "BUNDLE_BYTES", 96)
    monkeypatch.setattr(wire, "PACK_BYTES", 32)


def pairs(count, seed=1):
    """Random layout pairs, some of other world sizes, some with permuted ranks."""
    draw = random.Random(seed)
    for _ in range(count):
        ends = [draw.choice(FOUR + OTHER) for _ in range(2)]
        yield tuple((text, permuted(text, draw)) for text in ends)


def permuted(text, draw):
    order = list(range(owns(JOB, text).layout.world_size))
    if draw.random() < 0.3:
        draw.shuffle(order)
        return tuple(order)
    return ()


def built(catalogue, old, new, size, rounds):
    """As ``plans``, by the product's builder."""
    return [rank_plan(catalogue, old, new, rank, rounds) for rank in range(size)]


def switch(old, new, mode, transports=None, by=plans):
    """The ranks after a switch, and what each run gave."""
    size = num_holders(old, new)
    everybody = by(JOB, old, new, size, schedule(JOB, mode))
    transports = transports or local(size)
    agree = Ballot(size)
    ranks = [Rank(JOB, old, new, plan, transports[plan.rank], agree) for plan in everybody]
    return ranks, everywhere(ranks, lambda rank: ranks[rank].executor.run(20))


@pytest.mark.parametrize("by", [plans, built])
@pytest.mark.parametrize("mode", ["keep", "tight"])
@pytest.mark.parametrize("ends", list(pairs(10)), ids=lambda ends: f"{ends[0][0]}-{ends[1][0]}")
def test_every_element_arrives_at_its_place(ends, mode, by):
    (a, order_a), (b, order_b) = ends
    arrives(owns(JOB, a, order_a), owns(JOB, b, order_b), mode, by)


CROSSINGS = [
    ("fsdp2", "fsdp3", (0, 1, 2)),
    ("fsdp4", "fsdp2.tp2", (0, 2, 5, 4)),
    ("tp4", "dp2", (3, 1)),
    ("pp2.tp2", "dp2.fsdp2", (4, 5, 6, 7)),
]


@pytest.mark.parametrize("mode", ["keep", "tight"])
@pytest.mark.parametrize(("before", "after", "members"), CROSSINGS)
def test_every_element_arrives_where_some_leave_and_others_come(before, after, members, mode):
    arrives(owns(JOB, before), owns(JOB, after, members=members), mode, built)


def arrives(old, new, mode, by):
    ranks, results = switch(old, new, mode, by=by)
    assert results == [None] * len(ranks)
    for rank in ranks:
        assert rank.misplaced(new, rank.executor.new) == []
        assert rank.executor.ledger == planned_bytes(rank.plan)
        rank.executor.release() if mode == "keep" else None
        assert rank.pool.held == sum(piece.nbytes for piece in rank.executor.new.values())


def planned_bytes(plan):
    found = {}
    for move in (*plan.sends, *plan.receives, *plan.relays):
        for state in move.states:
            nbytes = volume(move.box) * ITEMSIZE[JOB[move.tensor].states[state].dtype]
            if nbytes:
                found[move.src, move.dst] = found.get((move.src, move.dst), 0) + nbytes
    return found


def on_nodes(size, ranks_per_node):
    """Of each rank, whether another one is on its machine."""
    return [lambda peer, node=rank // ranks_per_node: peer // ranks_per_node == node for rank in range(size)]


def by_place(size, ranks_per_node=8):
    """Transports that go from place to place within a machine."""
    hub = Hub(size)
    return [LocalTransport(hub, rank, direct=near) for rank, near in enumerate(on_nodes(size, ranks_per_node))]


def by_memory(size, ranks_per_node=8):
    """The product's over that of the tests: here all ranks are one process, which may read itself."""
    return [
        MemoryTransport(wire, {peer: os.getpid() for peer in range(size) if peer != rank and near(peer)})
        for rank, (wire, near) in enumerate(zip(local(size), on_nodes(size, ranks_per_node), strict=True))
    ]


@pytest.mark.parametrize("mode", ["keep", "tight"])
@pytest.mark.parametrize("ranks_per_node", [8, 2])
@pytest.mark.parametrize("make", [by_place, by_memory])
@pytest.mark.parametrize("seed", range(2))
def test_every_element_arrives_at_its_place_where_nothing_is_staged_on_a_machine(make, ranks_per_node, mode, seed):
    for (a, order_a), (b, order_b) in pairs(2, seed + 50):
        old, new = owns(JOB, a, order_a), owns(JOB, b, order_b)
        size = num_holders(old, new)
        lines = make(size, ranks_per_node)
        late = [LateTransport(line, seed * 31 + rank) for rank, line in enumerate(lines)] if seed else lines
        ranks, results = switch(old, new, mode, late)
        assert results == [None] * size
        for rank in ranks:
            assert rank.misplaced(new, rank.executor.new) == []
            assert rank.executor.ledger == planned_bytes(rank.plan)


@pytest.mark.parametrize("room", ["none", "some", "enough"])
def test_short_rows_are_packed_as_far_as_there_is_room_before_another_process_reads_them(monkeypatch, room):
    monkeypatch.setattr(exchange, "SCRATCH_BYTES", 64)
    monkeypatch.setattr(wire, "BUNDLE_BYTES", {"none": 5, "some": 48, "enough": 1 << 14}[room])
    sent = []

    class Watching(LocalTransport):
        def post(self, sends, receives):
            sent.extend(message.tensor for message in sends if message.tensor.dtype == torch.uint8)  # no checksums
            return super().post(sends, receives)

    old, new, hub = owns(JOB, "fsdp4"), owns(JOB, "fsdp2.tp2"), Hub(4)
    watched = [Watching(hub, rank, direct=lambda _peer: True) for rank in range(4)]
    ranks, results = switch(old, new, "keep", watched)
    assert results == [None] * 4
    for rank in ranks:
        assert rank.misplaced(new, rank.executor.new) == []
        assert rank.executor.ledger == planned_bytes(rank.plan)
        bound = exchange.staging_bound(wire.routes(rank.plan, JOB, 4, lambda _peer: True))
        assert rank.pool.peak <= simulated_peak(rank, "keep") + bound
    as_it_lies = {piece.storage.data_ptr() for rank in ranks for piece in rank.old.values() if piece.nbytes}
    packed = any(tensor.untyped_storage().data_ptr() not in as_it_lies for tensor in sent)
    strided = any(not tensor.is_contiguous() for tensor in sent)
    assert (packed, strided) == {"none": (False, True), "some": (True, True), "enough": (True, False)}[room]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["keep", "tight"])
def test_a_transport_that_delivers_as_late_as_it_may_changes_nothing(mode, seed):
    (a, order_a), (b, order_b) = next(pairs(1, seed + 100))
    old, new = owns(JOB, a, order_a), owns(JOB, b, order_b)
    size = max(old.layout.world_size, new.layout.world_size)
    late = [LateTransport(inner, seed * 31 + rank) for rank, inner in enumerate(local(size))]
    ranks, results = switch(old, new, mode, late)
    assert results == [None] * size
    assert [rank.misplaced(new, rank.executor.new) for rank in ranks] == [[]] * size


class EarlyExchange(exchange.Exchange):
    """Puts what arrives where it belongs before it has waited for it."""

    def _land(self, flight, deadline):
        super()._land(exchange.Flight(_Waited(), flight.receives, []), deadline)
        flight.pending.wait(deadline)


class _Waited:
    def wait(self, _seconds):
        pass


class EagerExchange(exchange.Exchange):
    """Takes the staging buffers of a wave for free again as soon as the wave is posted."""

    def _launch(self, wave, *given):
        flight = super()._launch(wave, *given)
        self._free += flight.staged
        return exchange.Flight(flight.pending, flight.receives, [])


@pytest.mark.parametrize("wrong", [EarlyExchange, EagerExchange])
def test_an_exchange_that_does_not_wait_is_found_out_by_the_late_transport(monkeypatch, wrong):
    old, new = owns(JOB, "fsdp4"), owns(JOB, "fsdp2.tp2")

    def outcome():
        late = [LateTransport(inner, rank) for rank, inner in enumerate(local(4))]
        return switch(old, new, "keep", late)[1]

    assert outcome() == [None] * 4
    monkeypatch.setattr(stamped, "Exchange", wrong)
    assert any(isinstance(result, CorruptMove) for result in outcome())


@pytest.mark.parametrize("wrong", ["freed", "written"])
def test_a_source_that_is_given_up_under_way_is_found_out_by_the_late_transport(wrong):
    one, other = (LateTransport(inner, seed) for seed, inner in enumerate(local(2)))
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    sending, arriving = one.post([Message(1, source)], []), other.post([], [Message(0, target)])
    if wrong == "freed":
        source.untyped_storage().resize_(0)
        with pytest.raises(AssertionError):
            sending.wait(5)
        return
    source.zero_()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(sending.wait, 5)
        arriving.wait(5)
    assert target.sum() == 0


def misplaced_by(ends, spoil_plan=lambda plan: plan, spoil_pieces=lambda _held: None):
    """Granules that each rank holds wrongly after a switch in which rank 0 has a spoiled plan or spoiled pieces."""
    agree, lines = Ballot(4), local(4)
    old, new = (owns(JOB, text) for text in ends)
    first, *others = plans(JOB, old, new, 4, schedule(JOB, "keep"))
    ranks = [Rank(JOB, old, new, plan, lines[plan.rank], agree) for plan in (spoil_plan(first), *others)]
    spoil_pieces(ranks[0].old)
    assert everywhere(ranks, lambda rank: ranks[rank].executor.run(20)) == [None] * 4
    return [rank.misplaced(new, rank.executor.new) for rank in ranks]


def test_the_stamps_show_a_dropped_move():
    def drop(plan):
        return dataclasses.replace(plan, relays=plan.relays[1:])

    assert misplaced_by(("fsdp4", "tp4")) == [[]] * 4
    assert [len(wrong) for wrong in misplaced_by(("fsdp4", "tp4"), drop)] == [1, 0, 0, 0]


def test_the_stamps_show_a_box_shifted_by_a_row():
    named = []

    def shift(plan):
        move = next(m for m in plan.sends if len(m.box) == 2 and m.box[0] == (2, 4))
        named.append(move)
        shifted = dataclasses.replace(move, box=((3, 5), move.box[1]))
        return dataclasses.replace(plan, sends=tuple(shifted if m == move else m for m in plan.sends))

    wrong = misplaced_by(("tp4", "fsdp4"), shift)
    assert wrong[named[0].dst] == [(named[0].tensor, named[0].states[0])]
    assert sum(map(len, wrong)) == 1


def test_the_stamps_show_two_states_swapped():
    def swap(held):
        held[2, 0], held[2, 1] = held[2, 1], held[2, 0]

    assert [(2, 0), (2, 1)] in misplaced_by(("fsdp4", "tp4"), spoil_pieces=swap)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_corrupted_byte_is_named_by_the_rank_that_received_it(victim):
    spoiled = []

    def tamper(src, dst, tensor):
        if dst == victim and not spoiled and tensor.numel() > 40:
            spoiled.append(src)
            tensor[40] ^= 1

    old, new = owns(JOB, "fsdp4"), owns(JOB, "fsdp2.tp2")
    ranks, results = switch(old, new, "keep", local(4, tamper=tamper))
    found = results[victim]
    assert isinstance(found, CorruptMove)
    assert (found.src, found.dst) == (spoiled[0], victim)
    named = next(t for t, tensor in enumerate(JOB) if tensor.name == found.tensor)
    assert (named, found.box) in {(m.tensor, m.box) for m in ranks[victim].plan.receives if m.src == found.src}
    for rank, result in enumerate(results):
        assert isinstance(result, CorruptMove if rank == victim else RoundRefused | TransportError)
        assert ranks[rank].misplaced(old, ranks[rank].old) == []


@pytest.mark.parametrize("wrong", ["nothing", "on the way", "a source", "an adopted source"])
@pytest.mark.parametrize("direct", [True, False])
def test_kept_sources_are_hashed_after_the_move_and_what_arrived_otherwise_is_named_then(wrong, direct):
    """New modules go on to write what they have adopted, and nobody writes any other source."""
    ends = ("tp2", "dp2.tp2") if wrong == "an adopted source" else ("fsdp4", "fsdp2.tp2")
    old, new = (owns(JOB, text) for text in ends)
    spoiled = []

    def tamper(_src, dst, tensor):
        if (wrong, dst) == ("on the way", 2) and not spoiled and tensor.numel() > 40:
            spoiled.append(tensor)
            tensor[-1] ^= 1

    agree, lines = Ballot(4), local(4, tamper=tamper, direct=lambda _peer: direct)
    ranks = [
        Rank(JOB, old, new, plan, lines[plan.rank], agree) for plan in plans(JOB, old, new, 4, schedule(JOB, "keep"))
    ]
    for rank in ranks:
        rank.executor._exchange._keeps_sources = True
    assert everywhere(ranks, lambda rank: ranks[rank].executor.run(20)) == [None] * 4
    sends = [move for move in ranks[1].plan.sends if volume(move.box)]
    if wrong == "a source":
        ranks[1].old[sends[-1].tensor, sends[-1].states[-1]].tensor.view(-1).view(torch.uint8)[:] ^= 1
    if wrong == "an adopted source":
        assert all((move.tensor, state) in ranks[1].plan.adopted for move in sends for state in move.states)
        for move in sends:
            ranks[1].old[move.tensor, move.states[-1]].tensor.zero_()

    def confirm(rank):
        try:
            ranks[rank].executor._exchange.confirm(3)  # as long as the others wait for it
        except CorruptMove:
            lines[rank].close()
            raise

    found = everywhere(ranks, confirm)
    if wrong in {"nothing", "an adopted source"} or (
        wrong == "a source" and not direct
    ):  # packed and hashed on the way
        assert found == [None] * 4
        return
    victim = 2 if wrong == "on the way" else sends[-1].dst
    assert isinstance(found[victim], CorruptMove)
    assert found[victim].dst == victim
    assert all(one is None or isinstance(one, TransportError) for rank, one in enumerate(found) if rank != victim)
    assert [rank.misplaced(old, rank.old) for rank in ranks if wrong == "on the way"] in ([], [[]] * 4)


@pytest.mark.parametrize("ends", [("fsdp4", "fsdp2.tp2"), ("pp2.fsdp2", "tp4"), ("dp4", "fsdp4")])
def test_memory_stays_within_the_simulated_peak_and_the_staging_bound(ends):
    old, new = owns(JOB, ends[0]), owns(JOB, ends[1])
    for mode in ("keep", "tight"):
        ranks, results = switch(old, new, mode)
        assert results == [None] * len(ranks)
        for rank in ranks:
            bound = exchange.staging_bound(wire.routes(rank.plan, JOB, len(ranks)))
            assert rank.pool.peak <= simulated_peak(rank, mode) + bound
            assert rank.pool.peak >= simulated_peak(rank, mode)


def test_a_warmed_exchange_allocates_nothing_more_than_targets():
    ends = owns(JOB, "fsdp4"), owns(JOB, "fsdp2.tp2")
    rounds, agree, lines = schedule(JOB, "keep"), Ballot(4), local(4)
    ranks = [Rank(JOB, *ends, plan, lines[plan.rank], agree) for plan in plans(JOB, *ends, 4, rounds)]
    for rank in ranks:
        rank.executor._exchange.warm()
    warm = [rank.pool.peak for rank in ranks]
    assert everywhere(ranks, lambda rank: ranks[rank].executor.run(20)) == [None] * 4
    assert [rank.pool.peak for rank in ranks] == warm
    assert any(peak > rank.old_bytes for peak, rank in zip(warm, ranks, strict=True))


def simulated_peak(rank, mode):
    held = peak = rank.old_bytes
    for number in rank.plan.schedule.rounds:
        mine = [g for g in number if g not in rank.plan.adopted]
        held += sum(rank.executor.new[g].nbytes for g in mine if g in rank.executor.new)
        peak = max(peak, held)
        if mode == "tight":
            held -= sum(rank.old[g].nbytes for g in mine if g in rank.old)
    return peak


def test_pieces_that_do_not_fit_are_all_named():
    old, new = owns(JOB, "fsdp4"), owns(JOB, "tp4")
    plan = plans(JOB, old, new, 4, schedule(JOB, "keep"))[0]
    rank = Rank(JOB, old, new, plan, local(4)[0], Ballot(4))
    one, two = granules(JOB)[0], granules(JOB)[4]
    rank.old[one] = dataclasses.replace(rank.old[one], box=((0, 1), (0, 1)))
    rank.old[two] = dataclasses.replace(rank.old[two], tensor=rank.old[two].tensor.double())
    with pytest.raises(ValueError, match=r"(?s)embedding.weight param: shape.*layers.0.wq param: dtype"):
        type(rank.executor)(
            exchange=exchange.Exchange(plan=plan, catalogue=JOB, transport=local(4)[0], pool=rank.pool),
            old=rank.old,
            target=rank.make,
            agree=Ballot(4),
            hook=lambda _event, _round: None,
        )
