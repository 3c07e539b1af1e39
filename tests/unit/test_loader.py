"""The loaders' cursor and shares, under a switcher that is only a layout and a step."""

import random
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.apart import apart

from dynatrain.data.order import batch_ids
from dynatrain.layout.form import LayoutError
from dynatrain.layout.text import parse_layout
from dynatrain.train.loader import DatasetLoader, LoaderError, StreamLoader
from dynatrain.train.sample_streams import SampleError
from dynatrain.train.streams import Streams


class Numbers(torch.utils.data.Dataset):
    """Item ``i`` is ``i``; counts how often each was loaded, in whichever process."""

    def __init__(self, size):
        self.loaded = torch.zeros(size, dtype=torch.int64).share_memory_()

    def __len__(self):
        return len(self.loaded)

    def __getitem__(self, i):
        self.loaded[i] += 1
        return i


class Noise(torch.utils.data.Dataset):
    """Every item is its number, and a number of each process-wide stream."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        drawn = [float(torch.rand((), dtype=torch.float64)), np.random.rand(), random.random()]  # noqa: NPY002
        return torch.tensor([i, *drawn], dtype=torch.float64)


def streams():
    """Where the process-wide streams stand."""
    return Streams.read(torch.device("cpu"))


class Counting:
    """A stream of 0 .. size - 1, each epoch from the start."""

    def __init__(self, size):
        self.size, self.at, self.resume = size, 0, None

    def __iter__(self):
        start, self.resume = self.resume or 0, None
        for item in range(start, self.size):
            self.at = item + 1
            yield item

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.resume = state["at"]


@pytest.fixture
def at(monkeypatch):
    """``at(layout, step, rank=0)`` is what a loader sees of a ``Switcher``."""

    def see(layout, step, rank=0):
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        return SimpleNamespace(layout=parse_layout(layout), step=step)

    return see


def loaders(size, batch):
    return (
        (DatasetLoader(Numbers(size), global_batch=batch, seed=3), lambda k: batch_ids(3, k, batch, size)),
        (StreamLoader(Counting(size), global_batch=batch), lambda k: np.arange(k * batch, (k + 1) * batch) % size),
    )


def test_batches_run_on_over_the_ends_of_epochs_and_every_id_comes_once_an_epoch(at):
    for data, expected in loaders(10, 4):
        taken = [data.next(at("dp1", step)).tolist() for step in range(15)]

        assert taken == [expected(step).tolist() for step in range(15)]
        flat = list(chain(*taken))
        assert all(sorted(flat[i : i + 10]) == list(range(10)) for i in range(0, 60, 10))


@pytest.mark.parametrize("layout", ["dp1", "dp4", "dp2.fsdp2", "fsdp2.tp2", "pp2.dp2", "tp4", "dp2.tp2.order_0_2_1_3"])
def test_shares_are_the_global_batch_dealt_out_to_data_ranks(at, layout):
    world = parse_layout(layout)
    for rank in range(world.world_size):
        place = world.coordinates(rank)
        share = slice(place.dp * world.size("fsdp") + place.fsdp, None, world.data_ranks)
        for data, expected in loaders(48, 8):
            for step in range(3):
                assert data.next(at(layout, step, rank)).tolist() == expected(step)[share].tolist()


def test_a_step_that_comes_again_gets_its_batch_again_in_the_layout_of_the_moment(at):
    for data, expected in loaders(12, 4):
        data.next(at("dp1", 0))
        assert data.next(at("dp2", 1, 1)).tolist() == expected(1)[1::2].tolist()
        assert data.next(at("dp1", 1)).tolist() == expected(1).tolist()
        assert data.state_dict()["items"] == 8
        assert data.next(at("dp1", 2)).tolist() == expected(2).tolist()


def test_a_switch_inside_a_step_whether_it_stands_or_not_leaves_the_batch_of_that_step(at):
    for data, expected in loaders(12, 4):
        data.next(at("dp1", 0))
        assert data.next(at("dp4", 1, 2)).tolist() == expected(1)[2::4].tolist()
        before = data.state_dict()
        data.load_state_dict(before)  # bound to the new layout
        assert data.next(at("dp2", 1, 1)).tolist() == expected(1)[1::2].tolist()
        data.load_state_dict(before)  # and taken back
        assert data.next(at("dp4", 1, 2)).tolist() == expected(1)[2::4].tolist()
        assert data.next(at("dp4", 2, 2)).tolist() == expected(2)[2::4].tolist()


def test_a_cursor_goes_on_in_another_world_whatever_its_step_is_called(at):
    for (data, expected), (other, _) in zip(loaders(10, 4), loaders(10, 4), strict=True):
        for step in range(7):
            data.next(at("dp1", step))
        state = data.state_dict()
        other.next(at("dp4", 0, 2))
        other.load_state_dict(state)

        assert other.state_dict() == {**state, "step": None}
        assert other.next(at("dp4", 0, 2)).tolist() == expected(7)[2::4].tolist()
        data.load_state_dict(state)  # its own, as a switch does
        assert data.next(at("dp2", 7, 1)).tolist() == expected(7)[1::2].tolist()
        assert data.next(at("dp2", 8, 1)).tolist() == expected(8)[1::2].tolist()


def test_a_cursor_at_the_very_end_of_an_epoch_goes_on_with_the_next(at):
    data, other = (StreamLoader(Counting(8), global_batch=4) for _ in range(2))
    for step in range(2):
        data.next(at("dp1", step))
    other.load_state_dict(data.state_dict())

    assert other.next(at("dp1", 0)).tolist() == [0, 1, 2, 3]


@apart
def test_workers_persist_load_their_own_share_alone_and_survive_a_change_of_share(at):
    dataset = Numbers(64)
    data = DatasetLoader(dataset, global_batch=8, seed=1, num_workers=2, prefetch_factor=2)
    before = torch.get_rng_state()
    taken = {step: data.next(at("dp4", step, 1)).tolist() for step in range(2)}
    pids = {worker.pid for worker in data._loader._iterator._workers}
    assert dataset.loaded.sum() <= 2 * (2 + 4)  # two ids a batch: two batches, and what is loaded ahead
    taken |= {step: data.next(at("dp2", step, 1)).tolist() for step in (2, 3)}
    taken[4] = data.next(at("dp2.tp2", 4, 3)).tolist()  # the same share

    assert taken == {step: batch_ids(1, step, 8, 64)[1 :: 4 if step < 2 else 2].tolist() for step in range(5)}
    assert {worker.pid for worker in data._loader._iterator._workers} == pids
    assert torch.equal(torch.get_rng_state(), before)


@apart
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_what_a_sample_draws_is_its_own_in_every_layout_in_workers_and_in_process_and_after_a_resume(at, workers):
    dataset = Noise()
    before = streams()
    alone = DatasetLoader(dataset, global_batch=16, seed=1)
    expected = [alone.next(at("dp1", step)).tolist() for step in range(10)]  # two epochs and a half
    assert streams().same(before), "training's own streams"
    of_sample = {}
    for epoch, row in zip((4 * [0] + 4 * [1] + 2 * [2]), expected, strict=True):
        for sample in row:
            of_sample[epoch, sample[0]] = sample
    assert len({number for sample in of_sample.values() for number in sample[1:]}) == 3 * len(of_sample), "none twice"

    layouts = ("dp2.tp2", "dp2.tp2", "tp4", "dp4", "fsdp2.tp2", "pp4", "dp2.tp2", "dp2.fsdp2", "tp4", "dp4")
    for rank in range(4):
        data = DatasetLoader(dataset, global_batch=16, seed=1, num_workers=workers)
        for step, layout in enumerate(layouts):
            world = parse_layout(layout)
            place = world.coordinates(rank)
            share = slice(place.dp * world.size("fsdp") + place.fsdp, None, world.data_ranks)
            if step == 6:
                state = data.state_dict()
                data = DatasetLoader(dataset, global_batch=16, seed=1, num_workers=workers)
                data.load_state_dict(state)
            assert data.next(at(layout, step, rank)).tolist() == expected[step][share]
        assert workers or streams().same(before)


def test_other_seeds_draw_otherwise_and_datasets_that_give_lists_are_asked_for_one_sample_at_a_time(at):
    class Listed(Noise):
        asked = ()

        def __getitems__(self, ids):
            self.asked = (*self.asked, ids)
            return [self[i] for i in ids]

    class Columns(Noise):
        def __getitems__(self, ids):
            return {"id": ids}

    one, other, listed = (
        DatasetLoader(of, global_batch=4, seed=seed) for of, seed in ((Noise(), 1), (Noise(), 2), (Listed(), 1))
    )
    first = one.next(at("dp1", 0))
    assert torch.equal(listed.next(at("dp1", 0)), first)
    assert listed._loader.dataset.asked == tuple([int(i)] for i in first[:, 0])
    drawn = {row[0]: row[1:] for step in range(16) for row in other.next(at("dp1", step)).tolist()}
    assert all(drawn[row[0]] != row[1:] for row in first.tolist())
    with pytest.raises(SampleError, match=r"Columns.__getitems__ gives dict for a list of one id"):
        DatasetLoader(Columns(), global_batch=4).next(at("dp1", 0))


@apart
def test_a_worker_init_fn_finds_the_users_dataset_and_collate_draws_alike_on_tp_ranks_alone(at):
    def name(_number):
        torch.utils.data.get_worker_info().dataset.name = 7.0

    class Named(Noise):
        name = 0.0

        def __getitem__(self, i):
            return torch.tensor([i, self.name])

    def collate(rows):
        return [torch.stack(rows), float(torch.rand(()))]

    taken = {}
    for layout, rank in (("dp2.tp2", 0), ("dp2.tp2", 1), ("dp2.tp2", 2)):
        data = DatasetLoader(
            Named(), global_batch=4, num_workers=1, worker_init_fn=name, collate_fn=collate, prefetch_factor=1
        )
        data.next(at("tp4", 0, rank))
        rows, drawn = data.next(at(layout, 1, rank))
        assert rows[:, 1].tolist() == [7.0, 7.0]
        taken[rank] = drawn
    assert taken[0] == taken[1] != taken[2]


def test_a_layout_that_cannot_share_the_batch_is_refused_with_one_that_can():
    for data, _ in loaders(48, 8):
        data.check_layout(parse_layout("dp2.tp3"))
        with pytest.raises(LayoutError, match=r"its 3 data ranks .* do not divide the global batch of 8") as caught:
            data.check_layout(parse_layout("fsdp3.tp2"))

        assert [8 % parse_layout(text).data_ranks for text in caught.value.nearest] == [0] * 3


def test_what_cannot_be_loaded_is_refused_by_name(at):
    with pytest.raises(LoaderError, match=r"drop_last is decided here and cannot be given; shuffle is"):
        DatasetLoader(Numbers(4), global_batch=2, shuffle=True, drop_last=True)
    with pytest.raises(LoaderError, match="the dataset is empty"):
        DatasetLoader(Numbers(0), global_batch=2)
    with pytest.raises(LoaderError, match=r"generator has no length or no items; StreamLoader takes"):
        DatasetLoader((i for i in range(3)), global_batch=2)
    with pytest.raises(LoaderError, match=r"list has no state_dict, load_state_dict; .*StatefulDataLoader"):
        StreamLoader([1, 2], global_batch=2)
    with pytest.raises(LoaderError, match="global_batch is 0"):
        StreamLoader(Counting(3), global_batch=0)
    with pytest.raises(LoaderError, match="Counting gave no item in a whole pass"):
        StreamLoader(Counting(0), global_batch=2).next(at("dp1", 0))


@pytest.mark.parametrize("other_batch", [2, 4, 6])
def test_a_cursor_goes_on_at_its_item_under_another_global_batch(at, other_batch):
    def taken(data, steps):
        return [item for step in range(steps) for item in data.next(at("dp1", step)).tolist()]

    for pick in (0, 1):
        data, _ = loaders(24, 4)[pick]
        first = taken(data, 3)
        other, _ = loaders(24, other_batch)[pick]
        other.load_state_dict(data.state_dict())

        rest = taken(other, 12 // other_batch)
        assert sorted(first + rest) == list(range(24)), "each once in the epoch"


def test_a_cursor_of_another_order_is_refused_by_name(at):
    data = DatasetLoader(Numbers(24), global_batch=4, seed=3)
    data.next(at("dp1", 0))
    state = data.state_dict()
    for other, said in (
        (DatasetLoader(Numbers(24), global_batch=4, seed=5), "seed was 3 and is 5"),
        (DatasetLoader(Numbers(25), global_batch=4, seed=3), "samples was 24 and is 25"),
    ):
        with pytest.raises(LoaderError, match=said):
            other.load_state_dict(state)
    for old in loaders(24, 4):
        with pytest.raises(LoaderError):
            old[0].load_state_dict({"batches": 2, "step": 1, "seed": 3, "samples": 24})
