"""Plain parameters that are one tp rank's part, of which FSDP2 may cut a share: every element goes to its place."""

import pytest
import torch
from tests.dist.foreign import Books, everywhere, switcher, until_ended
from torch import nn
from torch.distributed.fsdp import fully_shard

from dynatrain.space.box import within
from dynatrain.train.live import UnplacedTensorError
from dynatrain.train.optimizers.adafactor import Adafactor

SHAPES = {"rows": (12, 5), "columns": (7, 12), "low": (8, 3), "high": (4, 3), "words": (11, 2), "norm": (5,)}
SHARDED = {"rows": 0, "columns": 1, "pair": 0, "words": 0}
DECLARED = {
    "sharded": SHARDED,
    "segments": {"pair": {"low": SHAPES["low"][0], "high": SHAPES["high"][0]}},
    "padded": {"words": SHAPES["words"][0]},
}


def stamps(name, state):
    """Says which element of which state of which tensor it is."""
    size = torch.Size(SHAPES[name]).numel()
    return (torch.arange(size, dtype=torch.float64) + 1000 * list(SHAPES).index(name) + 10**5 * state).view(
        SHAPES[name]
    )


def build(mesh, layout, *, optimizer=torch.optim.AdamW, share=True):
    ways, index = layout.size("tp"), mesh.get_local_rank("tp")

    def part(dim, *wholes):
        param = nn.Parameter(torch.cat([whole.chunk(ways, dim)[index] for whole in wholes], dim).clone())
        param.partition_dim = dim
        return param

    net = nn.Module()
    net.rows, net.columns = part(0, stamps("rows", 0)), part(1, stamps("columns", 0))
    net.pair = part(0, stamps("low", 0), stamps("high", 0))
    net.words = part(0, torch.cat([stamps("words", 0), torch.zeros(-11 % (4 * ways), 2, dtype=torch.float64)]))
    net.norm = nn.Parameter(stamps("norm", 0).clone())
    if share:
        fully_shard(net, mesh=mesh["dp", "fsdp"])
    return net, optimizer(net.parameters())


def misplaced(sw, rank):
    """The states of which an element lies where another belongs."""
    wrong = []
    for (number, state), piece in sw.world.pieces(rank, torch.device("cpu")).items():
        tensor = sw.world.catalogue[number]
        if not tensor.states[state].scalar:
            whole = stamps(tensor.name, state)
            if not torch.equal(piece.tensor, whole[within(piece.box, tuple((0, size) for size in whole.shape))]):
                wrong.append((tensor.name, tensor.states[state].name))
    return wrong


@pytest.mark.parametrize("share", [True, False])
def test_every_element_lies_where_its_layout_says(share):
    tour = ("tp4", "fsdp2.tp2", "dp2.tp2", "fsdp4", "tp2.fsdp2") if share else ("tp4", "dp2.tp2", "dp4", "tp2.dp2")

    def work(world):
        sw = switcher(
            world,
            lambda *given: build(*given, share=share),
            tour[-1],
            data_parallel="free",
            recorder=(books := Books()),
            **DECLARED,
        )
        for (number, state), piece in sw.world.pieces(world.rank, torch.device("cpu")).items():
            tensor = sw.world.catalogue[number]
            if state and not tensor.states[state].scalar:  # parameters are as build has cut them
                whole = stamps(tensor.name, state)
                piece.tensor.copy_(whole[within(piece.box, tuple((0, size) for size in whole.shape))])
        seen, marks = [misplaced(sw, world.rank)], []
        for layout in tour:
            sw.request(layout)
            until_ended(sw, books)
            seen.append(misplaced(sw, world.rank))
            marks.append([getattr(sw.model.get_parameter(name), "partition_dim", None) for name in SHARDED])
        return seen, marks, [end[:2] for end in books.ends], tuple(sw.world.catalogue[0].shape)

    for seen, marks, ends, shape in everywhere(4, work):
        assert ends == [(layout, "committed") for layout in tour]
        assert seen == [[]] * (1 + len(tour))
        assert shape == SHAPES["rows"]
        if not share:  # fully_shard drops the marks itself
            assert marks == [list(SHARDED.values())] * len(tour)


def test_an_optimizer_that_counts_over_a_whole_matrix_is_refused():
    def work(world):
        with pytest.raises(UnplacedTensorError) as refused:
            switcher(world, lambda *given: build(*given, optimizer=Adafactor), "tp2", sharded={"rows": 0, "columns": 1})
        return str(refused.value)

    for said in everywhere(2, work):
        assert "state exp_avg_sq_row of rows is one number for many elements" in said
