"""Host memory for parked state, handles whose memory is away, and the promise of several jobs, each by itself."""

import gc
import mmap
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from dynatrain.execute.host import HostSegment, room_for
from dynatrain.execute.pieces import Piece, Pool
from dynatrain.execute.promise import Promise, PromiseError
from dynatrain.train.retire import Hidden, RetiredHandleError, tensors_of

pytestmark = pytest.mark.clock

MIB = 1 << 20


def shared_resident():
    """Bytes of shared memory that are mapped and resident in this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem"))
    return int(line.split()[1]) * 1024


def test_what_rests_is_out_of_the_process_and_comes_back_bit_by_bit():
    segment = HostSegment(room_for(8 * MIB, 2))
    before = shared_resident()
    one, other = segment.cut((MIB,), torch.float32), segment.cut((3, 5), torch.int64)
    one.copy_(torch.arange(MIB))
    other.fill_(7)
    assert shared_resident() - before >= 4 * MIB
    segment.rest()
    assert shared_resident() - before < MIB
    assert one.equal(torch.arange(MIB, dtype=torch.float32))
    assert other.eq(7).all()
    segment.close()
    assert shared_resident() - before < MIB
    assert one.eq(0).all()  # its memory is gone, whoever still refers to it


def test_a_closed_segment_gives_its_memory_back_to_the_machine():
    def left():
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:"))
        return int(line.split()[1]) * 1024

    segment = HostSegment(room_for(64 * MIB, 1))
    segment.cut((16 * MIB,), torch.float32).fill_(1)
    held = left()
    segment.close()
    segment.close()
    assert held - left() > 32 * MIB


def test_a_segment_has_room_for_what_was_asked_however_small_its_pieces():
    sizes = [1, 3, 64, 65, 0, 7] * 5
    segment = HostSegment(room_for(sum(sizes), len(sizes)))
    cut = [segment.cut((size,), torch.uint8) for size in sizes]
    for number, piece in enumerate(cut):
        piece.fill_(number)
    assert all(piece.eq(number).all() for number, piece in enumerate(cut))
    assert segment.nbytes % mmap.PAGESIZE == 0


def test_no_descriptor_and_no_mapping_is_left_of_segments():
    def count():
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("dynatrain-parked")
        return len(os.listdir("/proc/self/fd")), maps  # noqa: PTH208

    before = count()
    for _ in range(5):
        segment = HostSegment(room_for(MIB, 1))
        segment.cut((10,), torch.float32)
        segment.close()
    del segment
    assert count() == before


def test_hidden_handles_raise_with_their_names_and_are_what_they_were_when_shown():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    entries = {name: type("E", (), {"value": value}) for name, value in model.named_parameters()}
    wanted, hooks = model(torch.ones(3)), len(model._forward_pre_hooks)
    hidden = Hidden([model], tensors_of(entries, optimizer, {}), "is parked")
    for use in (
        lambda: model(torch.ones(3)),
        lambda: model.weight + 1,
        lambda: optimizer.state[model.bias]["exp_avg"] + 1,
    ):
        with pytest.raises(RetiredHandleError, match="is parked"):
            use()
    hidden.show()
    assert model(torch.ones(3)).equal(wanted)
    assert type(model.weight) is nn.Parameter
    assert len(model._forward_pre_hooks) == hooks
    assert not hasattr(model.weight, "_retired")


def test_a_promise_is_kept_by_all_pools_together_also_when_memory_is_restored():
    promise = Promise(1000)
    one, other = Pool(promise=promise), Pool(promise=promise)
    piece = Piece(one.allocate((150,), torch.float32), ((0, 150),))
    with pytest.raises(PromiseError, match=r"404 bytes more were asked for; .* hold 600 of the 1000 .*: 400 are left"):
        other.allocate((101,), torch.float32)
    assert (promise.held, other.held) == (600, 0)
    second = Piece(other.allocate((100,), torch.float32), ((0, 100),))
    one.give_back(piece)
    third = Piece(other.allocate((100,), torch.float32), ((0, 100),))
    with pytest.raises(PromiseError):
        one.restore(piece)
    assert piece.storage.nbytes() == 0
    other.give_back(second)
    one.restore(piece)
    other.give_back(third)
    assert (promise.held, promise.peak) == (600, 1000)


def test_memory_that_cannot_be_had_is_not_counted():
    promise = Promise(1 << 62)
    pool = Pool(promise=promise)
    with pytest.raises(RuntimeError):
        pool.allocate((1 << 59,), torch.float32)
    assert (promise.held, pool.held) == (0, 0)


def test_one_job_has_the_turn_until_it_ends_it():
    promise, actor, critic = Promise(10), object(), object()
    assert promise.take_turn(actor)
    assert promise.take_turn(actor)
    assert not promise.take_turn(critic)
    promise.end_turn(critic)
    assert not promise.take_turn(critic)
    promise.end_turn(actor)
    assert promise.take_turn(critic)


def test_threads_count_together():
    promise = Promise(10_000)

    def work():
        for _ in range(1000):
            promise.take(3)
            promise.give_back(3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert promise.held == 0
