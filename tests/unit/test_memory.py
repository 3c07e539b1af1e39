"""Moves through memory: a source is in use until it was read, a target once it was; who is gone is named."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.doubles import Hub, LocalTransport

from dynatrain.execute import attach, memory
from dynatrain.execute.memory import MemoryTransport, Nearest, neighbours
from dynatrain.execute.transport import Message, TransportError


def pair():
    """Two ranks that are one process, which may read itself."""
    hub = Hub(2)
    return [MemoryTransport(LocalTransport(hub, rank), {1 - rank: os.getpid()}) for rank in range(2)]


def test_a_source_is_in_use_until_the_other_end_has_read_it(monkeypatch):
    one, other = pair()
    source, target = torch.arange(60, dtype=torch.float64).view(6, 10), torch.zeros(10, 12, dtype=torch.float64)
    sent = one.post([Message(1, source[1:5, 2:7])], [])
    arriving = other.post([], [Message(0, target[:4, 5:10])])
    released = []

    def late(*given):
        with pytest.raises(TimeoutError):
            released.append(done.result(0.2))
        attach.read(*given)

    monkeypatch.setattr(memory, "read", late)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(sent.wait, 20)
        assert target.sum() == 0
        source += 1
        arriving.wait(20)
        done.result(20)
    assert released == []
    assert target[:4, 5:10].equal(source[1:5, 2:7])
    assert target.sum() == source[1:5, 2:7].sum()


def test_messages_of_a_pair_match_in_the_order_in_which_they_were_posted():
    one, other = pair()
    sources = [torch.full((5,), float(number)) for number in range(6)]
    targets = [torch.zeros(5) for _ in range(6)]
    sent = [one.post([Message(1, source) for source in sources[at : at + 2]], []) for at in (0, 2, 4)]
    arriving = [other.post([], [Message(0, target) for target in targets[at : at + 2]]) for at in (0, 2, 4)]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(lambda: [pending.wait(20) for pending in sent])
        for pending in arriving:
            pending.wait(20)
        waits.result(20)
    assert [int(target[0]) for target in targets] == [0, 1, 2, 3, 4, 5]


def test_a_rank_whose_memory_cannot_be_read_is_named():
    one, other = pair()
    one.post([Message(1, torch.zeros(4))], [])
    arriving = other.post([], [Message(0, torch.zeros(4))])
    other._near = {0: 1 << 22}  # nobody's number
    arriving._near = other._near
    with pytest.raises(TransportError, match=r"rank\(s\) 0 .*No such process"):
        arriving.wait(5)


@pytest.mark.parametrize("wrong", ["other machine", "forbidden", "another process", "nothing"])
def test_ranks_are_near_only_where_both_have_read_what_the_other_holds(monkeypatch, wrong):
    if wrong == "other machine":
        numbers = iter((1, 2))
        monkeypatch.setattr(memory, "machine", lambda: next(numbers))
    if wrong == "forbidden":
        reads = iter((True, False))
        really = memory._can_read
        monkeypatch.setattr(memory, "_can_read", lambda *given: really(*given) and next(reads))
    if wrong == "another process":  # of the same number, and readable, but not the one that was meant
        read = attach.read

        def other(process, _source, target, deadline):
            read(process, attach.Spans.of(target.starts[0], (8,), (1,)), target, deadline)

        monkeypatch.setattr(memory, "read", other)
    hub = Hub(2)
    lines = [LocalTransport(hub, rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: neighbours(lines[rank], [1 - rank], 20), range(2)))
    assert found == ([{1: os.getpid()}, {0: os.getpid()}] if wrong == "nothing" else [{}, {}])


def test_what_was_found_out_of_a_group_is_asked_once(monkeypatch):
    """Else whoever is late for a second switch over it would keep the others waiting."""

    class Group:
        def name(self):
            return "gloo"

        def rank(self):
            return 1

    asked = []
    monkeypatch.setattr(memory, "neighbours", lambda _wire, peers, _seconds: asked.append(peers) or {7: 1})
    nearest, one, other = Nearest(), Group(), Group()
    names = [nearest(group, [7, 3, 5]).name for group in (one, one, other, one)]
    assert asked == [[7, 5], [7, 5]]
    assert names == ["memory, gloo"] * 4
