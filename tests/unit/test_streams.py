"""Random streams that go from one kind of device to another."""

import torch

from dynatrain.train.streams import Streams

CPU = torch.device("cpu")


def test_what_a_rank_on_a_gpu_has_left_is_taken_up_on_a_processor_by_old_ranks_and_new_ones():
    before = Streams.read(CPU)
    there = Streams(before.python, before.numpy, before.host, torch.zeros(16, dtype=torch.uint8))
    try:
        new = there.of_new_rank(1, 5, CPU)
        assert new.device is None
        new.restore(CPU)
        assert Streams.read(CPU).same(new)
        there.restore(CPU)
        assert torch.equal(torch.get_rng_state(), before.host)
    finally:
        before.restore(CPU)
