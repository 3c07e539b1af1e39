"""Every element lies where its layout says, under its global name: rows, columns, layers, wrapped modules."""

import pytest
import torch
from tests.dist.foreign import Books, everywhere, switcher, until_ended
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dynatrain.layout.stages import stage_ranges
from dynatrain.models.names import strip_wrappers
from dynatrain.train.torch_private import local_tensor

CUTS = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "odd.weight": None, "five.weight": None, "down.bias": None}
"""The dim that tp cuts; fsdp cuts dim 0 of what is left."""


class Rows(nn.Module):
    """8 x 4, cut by rows twice; 6 x 8, cut by columns and rows; 10 and 5 rows, which 4 does not divide."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 6)
        self.odd, self.five = nn.Linear(3, 10, bias=False), nn.Linear(2, 5, bias=False)


def build_rows(mesh, _layout):
    net = Rows()
    if mesh["tp"].size() > 1:
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp", "fsdp"])
    return net, torch.optim.AdamW(net.parameters())


def stamp(number, shape, state):
    """Says which element of which state of which tensor it is."""
    size = torch.Size(shape).numel()
    return (torch.arange(size, dtype=torch.float32) + 1000 * number + 100_000 * state).view(shape)


def cut(whole, dim, ways, index):
    """One piece of ``ways`` ceil-sized ones."""
    pieces = whole.chunk(ways, dim)
    return pieces[index] if index < len(pieces) else whole.narrow(dim, 0, 0)


def lies(name, whole, sw, rank):
    """What ``rank`` should hold of a tensor: tp first, fsdp of what is left."""
    at, layout = sw.layout.coordinates(rank), sw.layout
    if CUTS[name] is not None:
        whole = cut(whole, CUTS[name], layout.size("tp"), at.tp)
    return cut(whole, 0, layout.size("fsdp"), at.fsdp)


def each(sw):
    """``(name, state number, value)`` of everything that is cut."""
    for name, entry in sw.world.found.items():
        held = sw.optimizer.state[entry.value]
        for number, value in enumerate((entry.value, held["exp_avg"], held["exp_avg_sq"])):
            yield name, number, value


@pytest.mark.parametrize("mode", [pytest.param("keep", marks=pytest.mark.sweep), "tight"])
def test_each_element_lies_where_its_layout_says_in_every_mesh_order(mode):
    tour = ["fsdp2.tp2", "tp2.fsdp2", "tp4", "fsdp4", "fsdp2.tp2.order_0_2_1_3", "dp2.tp2", "dp4", "tp2.dp2", "fsdp4"]

    def work(world):
        books = Books()
        sw = switcher(world, build_rows, "fsdp4", mode=mode, recorder=books, data_parallel="free")
        numbers = {name: number for number, name in enumerate(CUTS)}

        def wanted(name, state, value):
            return lies(name, stamp(numbers[name], value.shape, state), sw, world.rank)

        with torch.no_grad():
            for name, state, value in each(sw):
                local_tensor(value).copy_(wanted(name, state, value))
        wrong = []
        for target in tour:
            sw.request(target)
            until_ended(sw, books)
            for name, state, value in each(sw):
                here = local_tensor(value)
                if not (here.numel() == 0 == wanted(name, state, value).numel()):
                    same = torch.equal(here, wanted(name, state, value))
                    wrong += [] if same else [(target, name, state, here.tolist())]
        return wrong, books.ends

    for wrong, ends in everywhere(4, work):
        assert wrong == []
        assert [end[:2] for end in ends] == [(target, "committed") for target in tour]


class Stage(nn.Module):
    """Layers of one stage, numbered from 0 in every stage, as many pipelines do."""

    def __init__(self, layers):
        super().__init__()
        self.first = layers[0]
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in layers)


def build_stage(mesh, layout):
    net = Stage(stage_ranges(layout, 4)[mesh.get_local_rank("pp")])
    fully_shard(net, mesh=mesh["dp", "fsdp"])
    return net, torch.optim.AdamW(net.parameters())


def global_name(part, path):
    layers, number, rest = path.split(".", 2)
    return f"{layers}.{int(number) + part.first}.{rest}"


def test_layers_keep_their_global_numbers_over_stages():
    def work(world):
        books = Books()
        sw = switcher(world, build_stage, "fsdp4", names=global_name, recorder=books, data_parallel="free")
        with torch.no_grad():
            for number, layer in enumerate(sw.model.layers):
                local_tensor(layer.weight).fill_(number)
        seen = []
        for target in ("pp2.fsdp2", "pp4", "pp2_1_3.dp2", "fsdp4"):
            sw.request(target)
            until_ended(sw, books)
            held = [[float(v) for v in set(local_tensor(layer.weight).view(-1).tolist())] for layer in sw.model.layers]
            seen.append((sw.layout.coordinates(world.rank).pp, held))
        return seen, [end[1:] for end in books.ends]

    stages = {
        0: ({0: [0, 1], 1: [2, 3]}),
        1: ({0: [0], 1: [1], 2: [2], 3: [3]}),
        2: ({0: [0], 1: [1, 2, 3]}),
        3: ({0: [0, 1, 2, 3]}),
    }
    for seen, ends in everywhere(4, work):
        assert ends == [("committed", "")] * 4
        for number, (stage, held) in enumerate(seen):
            # A rank may hold no row of a layer (3 rows over 4 ranks), but then of none.
            assert held in ([[float(layer)] for layer in stages[number][stage]], [[] for _ in held])


def test_layer_numbers_of_a_stage_alone_are_refused_by_name():
    def work(world):
        books = Books()
        for first, target in (("fsdp4", "pp2.fsdp2"), ("pp2.fsdp2", "pp2.dp2")):
            sw = switcher(world, build_stage, first, name=first, recorder=books, data_parallel="free")
            with torch.no_grad():
                local_tensor(sw.model.layers[0].weight).fill_(sw.layout.coordinates(world.rank).pp)
            sw.request(target)
            until_ended(sw, books)
            sw.close()
        return books.ends

    for (_, one, why_one), (_, other, why_other) in everywhere(4, work):
        assert (one, other) == ("aborted", "aborted")
        assert "build no longer makes layers.2.weight" in why_one
        assert "layers.0.weight param" in why_other
        assert "differed before the switch" in why_other


def test_wrappers_in_any_order_leave_canonical_names():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self._orig = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)

    inner = Inner

    orders = {
        "checkpointed": lambda: checkpoint_wrapper(inner()),
        "compiled": lambda: torch.compile(inner()),
        "checkpoint of compiled": lambda: checkpoint_wrapper(torch.compile(inner())),
        "compiled checkpoint": lambda: torch.compile(checkpoint_wrapper(inner())),
        "twice": lambda: checkpoint_wrapper(checkpoint_wrapper(inner())),
        "in data parallel": lambda: nn.DataParallel(inner()),
        "in DDP": lambda: DistributedDataParallel(inner()),
        "in FSDP1": lambda: FullyShardedDataParallel(inner(), use_orig_params=True, device_id=torch.device("cpu")),
        "in FSDP1, compiled": lambda: FullyShardedDataParallel(
            torch.compile(inner()), use_orig_params=True, device_id=torch.device("cpu")
        ),
    }

    def work(_world):
        mesh, found = init_device_mesh("cpu", (1,)), {}
        for name, wrap in orders.items():
            for sharded in (False,) if name.startswith("in ") else (False, True):  # those shard or copy themselves
                part, child = wrap(), nn.Sequential(nn.Sequential(wrap()))
                for module in (part, child[0][0], child) if sharded else ():
                    fully_shard(module, mesh=mesh)
                for where, top in (("top", part), ("inside", child)):
                    found[name, sharded, where] = [strip_wrappers(top, path) for path, _ in top.named_parameters()]
        return found

    (found,) = everywhere(1, work)
    plain = [path for path, _ in inner().named_parameters()]
    for (name, sharded, where), names in found.items():
        before = "0.0." if where == "inside" else ""
        assert names == [before + path for path in plain], (name, sharded, where)
