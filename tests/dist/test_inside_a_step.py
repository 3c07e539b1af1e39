"""A switch between two micro-batches of a step: the run is the oracle's, which knows no switches."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.dist.test_same_numbers import TIED, furthest
from tests.jobs import SHAPE, Books, Case, everywhere, expected, switcher, train
from tests.shapes import latent_shape

from dynatrain.layout.text import print_layout
from dynatrain.train import install, trainer
from dynatrain.train.adopt import shard_like
from dynatrain.train.torch_private import local_tensor

EXPERTS = latent_shape(router_aux_loss_coef=0.1)
"""With counters of what each expert was sent, which are half way when the switch comes."""

TOURS = {
    "every axis": Case(tour=("fsdp4", "tp4", "fsdp2.tp2", "dp4", "pp2.fsdp2"), after=2, modes=("tight", "keep")),
}
LONG = {
    "the other modes": Case(tour=("fsdp4", "tp4", "fsdp2.tp2", "dp4", "pp2.fsdp2"), after=3, modes=("keep", "tight")),
    "counters": Case(tour=("fsdp4.ep4", "pp2.tp2.ep2", "dp2.tp2-sp"), after=2, shape=EXPERTS, modes=("keep", "tight")),
    "gathered once a step": Case(tour=("fsdp4-z1", "dp2.fsdp2-z1", "fsdp4-z2", "fsdp4-z1"), after=4, micro_batches=8),
    "a tied embedding": Case(
        tour=("pp4", "pp2.fsdp2", "fsdp2.tp2", "pp4"), after=1, shape=TIED, modes=("keep", "tight")
    ),
    "contexts": Case(tour=("cp2.fsdp2", "cp4-ring", "dp2.cp2"), after=2, shape=EXPERTS),
    "uneven shares": Case(tour=("fsdp3", "dp3", "pp3"), size=3, after=5, micro_batches=8),
    "rounds": Case(tour=("dp2", "pp2v2", "pp2-zb", "pp2v2-zbv"), size=2, after=3, micro_batches=8),
    "gpipe": Case(tour=("pp4", "dp4", "pp2.tp2"), after=1, schedule="gpipe"),
}


@pytest.mark.parametrize("name", [*TOURS, *(pytest.param(name, marks=pytest.mark.sweep) for name in LONG)])
def test_a_run_with_switches_inside_its_steps_is_the_oracles(name):
    assert max(furthest((TOURS | LONG)[name])) <= 1e-12


def test_among_dp_and_fsdp_every_bit_is_the_oracles_where_the_parts_are_subtrees():
    heads = replace(SHAPE, num_key_value_heads=SHAPE.num_attention_heads)  # as in test_same_bits
    case = Case(tour=("dp2", "fsdp2"), size=2, compute="fp32", clip=100.0, after=2, micro_batches=8, shape=heads)

    assert furthest(case)[0] == 0


def stamps(world, rank):
    """``{name: gradient}`` of this rank, in which each element tells its place in the tensor, and the tensor."""
    found = {}
    for number, tensor in enumerate(world.catalogue):
        if tensor.name in world.found and world.found[tensor.name].kind == "param":
            places = torch.zeros((), dtype=torch.float64)
            for (start, stop), size in zip(world.ownership.box(tensor, rank), tensor.shape, strict=True):
                places = places[..., None] * size + torch.arange(start, stop)
            found[tensor.name] = places + number / 64
    return found


def gradients(world):
    """``{name: local gradient}``; a step that has one is over, and they are gone."""
    held = {name: entry.value for name, entry in world.found.items() if entry.value.grad is not None}
    found = {name: local_tensor(param.grad) for name, param in held.items()}
    for param in held.values():
        param.grad = None
    return found


def test_each_element_of_every_gradient_lands_at_its_place_and_no_memory_stays():
    tour = ("dp4", "fsdp4.ep4", "pp2.tp2.ep2", "dp2.tp2-sp", "fsdp2.tp2.etp2", "dp4")

    def work(world):
        books, wrong, held = Books(), [], []
        sw = switcher(Case(tour=tour, shape=EXPERTS).job(), world, tour[0], recorder=books)
        for number, layout in enumerate(tour[1:], 1):
            sw.request(layout, after=number, mode=("keep", "tight")[number % 2], at=10 * number)
        for step in sw.steps(until=10 * len(tour)):
            for part in sw.step_parts(8):
                if part.start:
                    want, have = stamps(sw.world, world.rank), gradients(sw.world)
                    same = want.keys() == have.keys() and all(have[name].equal(want[name]) for name in want)
                    wrong += [] if same else [step]
                elif part.stop < 8:
                    for name, value in stamps(sw.world, world.rank).items():
                        param = sw.world.found[name].value
                        param.grad = shard_like(param, value.flatten())
            dist.barrier()
            held.append(sw._party.memory.held)
        return books.switches, wrong, held[0] - held[-1]

    for switches, wrong, freed in everywhere(4, work):
        assert switches == [("committed", "", 10 * number, True) for number in range(1, len(tour))]
        assert (wrong, freed) == ([], 0)


def test_a_gradient_that_some_of_its_holders_do_not_have_is_refused_by_name_and_stays():
    """One that none of them has is carried as none: ``test_every_cell.py``, parameters without a gradient yet."""

    def work(world):
        books, found, same = Books(), {}, False
        case = Case(tour=("fsdp2",), size=2)
        sw = switcher(case.job(), world, "fsdp2", recorder=books)
        sw.request("dp2", after=1)
        for _ in sw.steps(until=1000):
            for part in sw.step_parts(2):
                if part.stop == 1:
                    for name, value in stamps(sw.world, world.rank).items():
                        if (name, world.rank) != ("norm.weight", 1):
                            param = sw.world.found[name].value
                            param.grad = shard_like(param, value.flatten())
                elif part.start:
                    found = gradients(sw.world)
                    same = all(value.equal(stamps(sw.world, world.rank)[name]) for name, value in found.items())
            dist.barrier()
            if books.switches:
                break
        return books.switches[0][:2], "norm.weight" in found, same

    for rank, ((outcome, reason), there, same) in enumerate(everywhere(2, work)):
        assert (outcome, there, same) == ("aborted", rank == 0, True)
        assert "norm.weight: ranks [0] have a gradient after this part of the step, others none" in reason


def test_a_loop_that_does_not_divide_its_steps_is_told_so_and_trains_on():
    def work(world):
        books = Books()
        sw = switcher(Case(tour=("fsdp2",), size=2).job(), world, "fsdp2", recorder=books)
        sw.request("dp2", after=8)
        for _ in sw.steps(until=1000):
            assert list(sw.step_parts(8)) == [range(8)]
            dist.barrier()
            if books.switches:
                break
        return books.switches[0], print_layout(sw.layout)

    for (outcome, reason, _, _), layout in everywhere(2, work):
        assert (outcome, layout) == ("aborted", "fsdp2")
        assert "Switcher.step_parts" in reason


SHORT = Case(tour=("fsdp2.ep2", "tp2"), size=2, after=1, micro_batches=2, shape=EXPERTS)


def dropped(world, pieces):
    give(world, {name: torch.zeros_like(piece) for name, piece in pieces.items()})


def doubled(world, pieces):
    give(world, {name: 2 * piece for name, piece in pieces.items()})


give = install.give
FAULTS = {
    "gradients dropped": (install, "give", dropped),
    "gradients doubled": (install, "give", doubled),
    "counters lost": (trainer, "total_counts", lambda part, _: drop_all(part)),
    "counters counted by all": (trainer, "drop_counts", lambda _part: None),
}
drop_all = trainer.drop_counts


@pytest.fixture(scope="module")
def right():
    return expected(SHORT)[1]


ONE = ("nothing", "counters lost")


@pytest.mark.parametrize(
    "name", [*ONE, *(pytest.param(name, marks=pytest.mark.sweep) for name in FAULTS if name not in ONE)]
)
def test_planted_faults_are_seen(monkeypatch, name, right):
    if name in FAULTS:
        monkeypatch.setattr(*FAULTS[name])

    apart = max(apart for rank in train(SHORT, right) for apart in rank["apart"][-1].values())
    assert apart > 1e-9 if name in FAULTS else apart <= 1e-12
