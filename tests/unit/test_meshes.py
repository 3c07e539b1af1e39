"""Meshes that are not what the layout says, and gradients that nothing reduces. Rank 0 of a world that is not there."""

import pytest
import torch
import torch.distributed as dist
from tests.faces import Half, build_with
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from dynatrain.layout.text import parse_layout
from dynatrain.models.names import strip_wrappers
from dynatrain.space.tensor import State
from dynatrain.train.live import UnplacedTensorError, describe, entries
from dynatrain.train.party import Party
from dynatrain.train.targets import require_reduced
from dynatrain.train.world import World

AXES = ("dp", "fsdp", "tp")


@pytest.fixture(autouse=True)
def world():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def built(text, build, data_parallel="fixed"):
    """This rank and its world, of which only what the functions here read is there."""
    layout = parse_layout(text)
    mesh = init_device_mesh("cpu", tuple(layout.size(axis) for axis in AXES), mesh_dim_names=AXES)
    net, optimizer = build(mesh, layout)
    party = Party.__new__(Party)
    party.rank, party.data_parallel = 0, data_parallel
    return party, World(layout, mesh, [net], optimizer, entries([net], strip_wrappers))


def described(text, build):
    _, world = built(text, build)
    states = {
        name: (State(entry.kind, str(entry.value.dtype).removeprefix("torch.")),) for name, entry in world.found.items()
    }
    return describe(world.found, states, world.layout, 0)


def other_mesh(ranks, names):
    """A build that makes a mesh of its own."""

    def build(_mesh, _layout):
        net = nn.Linear(8, 8, bias=False)
        mine = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        if "tp" in names:
            parallelize_module(net, mine["tp"], ColwiseParallel())
        fully_shard(net, mesh=mine["fsdp"])
        return net, torch.optim.SGD(net.parameters())

    return build


@pytest.mark.parametrize(
    ("text", "ranks", "names", "axes"),
    [
        ("fsdp4", [3, 2, 1, 0], ("fsdp",), ["fsdp"]),
        ("fsdp2.tp2", [[0, 1], [2, 3]], ("tp", "fsdp"), ["tp", "fsdp"]),
        ("fsdp2.tp2", [[0, 2], [1, 3]], ("fsdp", "tp"), ["tp", "fsdp"]),
    ],
)
def test_a_mesh_that_counts_ranks_in_another_order_is_refused_axis_by_axis(text, ranks, names, axes):
    with pytest.raises(UnplacedTensorError) as caught:
        described(text, other_mesh(ranks, names))
    for axis in axes:
        assert f"weight: axis {axis} of its mesh" in str(caught.value)


def test_a_mesh_of_the_users_own_in_the_layouts_order_is_taken():
    (one,) = described("fsdp2.tp2", other_mesh([[0, 1], [2, 3]], ("fsdp", "tp")))
    assert one.cuts == (("tp", 0), ("fsdp", 0))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_type_that_nothing_moves_is_refused_with_those_that_can_be():
    with pytest.raises(UnplacedTensorError, match=r"table: buffer has dtype complex32.*float8_e4m3fn.*complex64"):
        described("fsdp4", build_with(make=Half))


@pytest.mark.parametrize("text", ["dp4", "dp2.fsdp2"])
def test_a_build_that_overlooks_dp_is_refused_unless_the_loop_reduces(text):
    forgetful = build_with(axes=("fsdp",))
    with pytest.raises(UnplacedTensorError, match=r"inside\.weight: nothing reduces its gradient over dp"):
        require_reduced(*built(text, forgetful))
    require_reduced(*built(text, forgetful, data_parallel="own"))
    require_reduced(*built(text, build_with(lambda net, _: net.set_all_reduce_hook(lambda _: None), axes=("fsdp",))))
    require_reduced(*built(text, build_with()))
    require_reduced(*built("fsdp4", forgetful))


def test_a_build_that_overlooks_fsdp_is_refused():
    with pytest.raises(UnplacedTensorError, match="over fsdp;"):
        require_reduced(*built("dp2.fsdp2", build_with(axes=("dp",))))


def test_what_fsdp_has_reduced_before_it_must_reduce_after_it_and_frozen_tensors_need_none():
    def sometimes(mesh, layout):
        net = nn.Linear(4, 4)
        if layout.size("fsdp") > 1:
            fully_shard(net, mesh=mesh["dp", "fsdp"])
        net.bias.requires_grad_(requires_grad=False)
        return net, torch.optim.SGD(net.parameters())

    _, before = built("fsdp4", sometimes)
    party, after = built("dp4", sometimes)

    require_reduced(party, after)  # the loop does it, as far as can be told
    with pytest.raises(UnplacedTensorError, match=r"^weight: nothing reduces its gradient over dp; in dp4"):
        require_reduced(party, after, before)
