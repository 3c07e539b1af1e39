"""Rows and columns that nothing divides, or fewer than ranks, on real modules: torch's own shards are our boxes."""

import pytest
import torch
from tests.dist.foreign import Books, everywhere, switcher, until_ended
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from dynatrain.space.box import within
from dynatrain.train import live
from dynatrain.train.agreement import StartRefusedError

DIMS = (1, 5, 6, 7, 11, 17)
SHAPES = {f"{rows}x{columns}": (rows, columns) for rows in DIMS for columns in (3, 5)} | {f"{n}": (n,) for n in DIMS}


def stamps(number):
    """The whole tensor of one place: each element a number that occurs nowhere else, exact in fp64."""
    shape = list(SHAPES.values())[number]
    return 1000.0 * number + torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


class Odd(nn.Module):
    """Every shape twice: tp cuts the rows of ``rows``, the columns of ``columns``; fsdp the rows of both."""

    def __init__(self, mesh):
        super().__init__()
        for kind, dim in (("rows", 0), ("columns", 1)):
            of_kind = nn.ParameterDict()
            for number, (name, shape) in enumerate(SHAPES.items()):
                value = stamps(number) if torch.empty(0).device.type != "meta" else torch.empty(shape).double()
                if mesh.size() > 1 and dim < len(shape):
                    value = distribute_tensor(value, mesh, [Shard(dim)])
                of_kind[name] = nn.Parameter(value)
            setattr(self, kind, of_kind)


def build(mesh, _layout):
    net = Odd(mesh["tp"])
    fully_shard(net, mesh=mesh["dp", "fsdp"])
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def misplaced(sw):
    """Names and states of this rank whose elements are not those of its box."""
    catalogue, wrong = sw.world.catalogue, []
    for (tensor, state), piece in sw.world.pieces(sw._party.rank, torch.device("cpu")).items():
        name = catalogue[tensor].name
        whole = stamps(list(SHAPES).index(name.split(".", 1)[1])) * (1 + state)
        place = within(piece.box, tuple((0, size) for size in whole.shape))
        if piece.tensor.shape != whole[place].shape or not torch.equal(piece.tensor, whole[place]):
            wrong.append((name, state, piece.box))
    return wrong


FOUR = (4, ("fsdp4", "fsdp2.tp2", "tp4", "tp2.fsdp2", "fsdp4"))
SIX = (6, ("fsdp2.tp3", "tp2.fsdp3", "fsdp3.tp2", "dp2.fsdp3"))


@pytest.mark.parametrize(
    ("size", "tour", "mode"),
    [
        (*SIX, "tight"),
        pytest.param(*FOUR, "keep", marks=pytest.mark.sweep),
        pytest.param(*FOUR, "tight", marks=pytest.mark.sweep),
        pytest.param(*SIX, "keep", marks=pytest.mark.sweep),
    ],
)
def test_shards_that_torch_cuts_unevenly_are_read_and_moved_to_the_element(size, tour, mode):
    def work(world):
        sw = switcher(world, build, tour[0], mode=mode, data_parallel="free", recorder=(books := Books()))
        for (tensor, state), piece in sw.world.pieces(world.rank, torch.device("cpu")).items():
            if state:  # the parameters are as torch has cut them
                whole = 2 * stamps(list(SHAPES).index(sw.world.catalogue[tensor].name.split(".", 1)[1]))
                piece.tensor.copy_(whole[within(piece.box, tuple((0, n) for n in whole.shape))])
        seen = [misplaced(sw)]
        for layout in tour[1:]:
            sw.request(layout)
            until_ended(sw, books)
            seen.append(misplaced(sw))
        empty = any(not piece.tensor.numel() for piece in sw.world.pieces(world.rank, torch.device("cpu")).values())
        return seen, [end[1:] for end in books.ends], empty

    found = everywhere(size, work, 120)
    for seen, ends, _ in found:
        assert ends == [("committed", "")] * len(tour[1:])
        assert seen == [[]] * len(tour)
    assert any(empty for *_, empty in found)  # one row over several ranks


def test_boxes_in_another_order_of_cuts_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(live, "CUT_ORDER", live.CUT_ORDER[::-1])

    def work(world):
        with pytest.raises(StartRefusedError) as refused:
            switcher(world, build, "fsdp2.tp2")
        return str(refused.value)

    said = everywhere(4, work)
    for one in said:  # also those of the ranks whose boxes are right either way
        assert "rows.6x3: rank 1 holds (2, 3) of (6, 3)" in one
        assert "rows.6x3: rank 2 holds (1, 3) of (6, 3)" in one
