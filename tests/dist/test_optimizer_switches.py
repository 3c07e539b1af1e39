"""A run with each optimizer, switched, saved and loaded in other layouts, beside the run of one process."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.jobs import Books, Case, distance, everywhere, switcher
from tests.shapes import small_shape

from dynatrain.cluster.board import Board
from dynatrain.execute.census import compare, digest_vector
from dynatrain.observe.checkpoints import newest
from dynatrain.space.optimizers import OPTIMIZERS
from dynatrain.train.saving import Saves
from dynatrain.train.trainer import Trainer

NAMES = [name for name in OPTIMIZERS if name != "adamw"]
EXACT = [name for name in NAMES if name != "adamw8bit"]
"""Codes of one byte flip at 1e-16, and the reductions of these layouts have not the same bits."""
SAME_BITS = [name for name in NAMES if name != "adafactor"]
"""Given gradients of equal bits, as dp and fsdp give; Adafactor sums its columns over the ranks that cut the rows."""
SHAPE = small_shape(num_key_value_heads=1, hidden_size=18, head_dim=4, intermediate_size=300)
"""Rows of 300 elements: a block and a part of one. One key/value head, of which two tp ranks hold copies."""
CASE = Case(tour=("fsdp2", "tp2", "pp2"), size=2, shape=SHAPE, micro_batches=2)


class Run:
    """A job with one optimizer; has means of its own, so that one process may have several after each other."""

    def __init__(self, world, name, layout, *, prefix="", clip=1.0, **more):
        board = dist.TCPStore("127.0.0.1", world.store.port, is_master=False)
        means = {
            "board": Board(dist.PrefixStore(f"{prefix}board/{name}", board), world.size),
            "store": dist.PrefixStore(f"{prefix}groups/{name}", world.store),
        }
        job = CASE.job()
        job = replace(job, optimizer=replace(job.optimizer, name=name, lr=1e-2, clip_norm=clip))
        self.losses = []
        self.sw = switcher(job, world, layout, **means, **more)
        self.trainer = Trainer(job, CASE.data(), self.sw, lambda result: self.losses.append(result.loss))


def alone(world):
    """``{optimizer: (losses, whole states at the end)}`` of one process."""
    found = {}
    for name in EXACT:
        run = Run(world, name, "dp1")
        run.trainer.run(CASE.steps)
        found[name] = run.losses, {key: value.clone() for key, value in run.sw.world.values().items()}
        run.sw.close()
    return found


def switched(world, root, want):
    """``{optimizer: (switches, losses, distances from the states of one process, loaded as saved)}``."""
    found = {}
    for name in NAMES:
        books, saves = Books(), Saves(root=root / name)
        run = Run(world, name, CASE.tour[0], recorder=books, saves=saves)
        for number, layout in enumerate(CASE.tour[1:], 1):
            run.sw.request(layout, mode=("keep", "tight")[number % 2], at=number * CASE.steps_each)
        run.trainer.run(CASE.steps)
        states = distance(run.sw.world, world.rank, want[name][1]) if name in want else {}
        run.sw.save_now()
        run.sw.close()
        other = Run(world, name, "tp2", prefix="loaded/").sw
        other.load(newest(saves.root)[0])
        found[name] = books.switches, run.losses, states, same_state(run.sw.world, other.world, world.rank)
        other.close()
    return found


def in_dp_and_fsdp(world):
    """``{optimizer: losses of each step, in fsdp2 alone and with a switch to dp2}``."""
    found = {}
    for name in SAME_BITS:
        for tour in ({}, {CASE.steps_each: "dp2"}):
            run = Run(world, name, "fsdp2", clip=0.0, schedule=tour, recorder=(books := Books()))
            run.trainer.run(2 * CASE.steps_each)
            assert [outcome for outcome, *_ in books.switches] == ["committed"] * len(tour)
            found.setdefault(name, []).append(run.losses)
            run.sw.close()
    return found


def same_state(one, other, rank):
    """Whether two worlds of this process hold the same bits of every state, in whatever layouts."""
    device, cut = torch.device("cpu"), other.ownership
    before = digest_vector(one.pieces(rank, device), one.catalogue, one.ownership, cut, rank)
    # The same tensors by name, in this world's order.
    numbers = {tensor.name: index for index, tensor in enumerate(one.catalogue)}
    pieces = {(numbers[other.catalogue[t].name], s): p for (t, s), p in other.pieces(rank, device).items()}
    after = digest_vector(pieces, one.catalogue, cut, cut, rank)
    both = torch.cat([before, after])
    dist.all_reduce(both)
    return compare(both[: len(before)], both[len(before) :], one.catalogue, one.ownership, cut).equal


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The runs of one process, and the switched ones of each rank."""
    single = everywhere(1, alone)[0]
    root = tmp_path_factory.mktemp("checkpoints")
    return single, everywhere(2, lambda world: switched(world, root, single), 120)


@pytest.mark.parametrize("name", NAMES)
def test_every_switch_is_committed_with_equal_digests_and_a_checkpoint_loads_in_another_layout(runs, name):
    for found in runs[1]:
        switches, losses, _, loaded = found[name]
        assert [(outcome, equal) for outcome, _, _, equal in switches] == [("committed", True)] * (len(CASE.tour) - 1)
        assert len(losses) == CASE.steps
        assert loaded


@pytest.mark.parametrize("name", EXACT)
def test_a_switched_run_is_the_run_of_one_process(runs, name):
    single, found = runs
    for rank in found:
        _, losses, states, _ = rank[name]
        assert max(states.values()) <= 1e-12
        assert len(states) > 1
        assert max(abs(a - b) for a, b in zip(losses, single[name][0], strict=True)) <= 1e-12


def test_among_dp_and_fsdp_training_has_the_same_bits():
    for found in everywhere(2, in_dp_and_fsdp):
        for name, (stayed, moved) in found.items():
            assert stayed == moved, name
