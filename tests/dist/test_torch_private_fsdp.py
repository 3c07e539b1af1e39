"""FSDP2's private parts that the project relies on: one test for each function of ``train/torch_private_fsdp.py``."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.dist.foreign import Net, everywhere
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp_collectives
from torch.distributed.tensor import DTensor

from dynatrain.train import torch_private_fsdp
from dynatrain.train.torch_private import local_tensor, shard_of
from dynatrain.train.torch_private_fsdp import (
    adopt_padded,
    drop_gathered,
    fsdp_reductions,
    fsdp_settings,
    padded_numels,
    reduce_empty_gradients,
    set_fsdp,
    share_shard,
    takes_means,
    unreduced,
)

SECONDS = timedelta(seconds=10)


def test_drop_gathered():
    """A forward that is broken off leaves gathered what stays gathered until the backward, and ``reshard`` keeps it."""

    def work(_world):
        net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)

        def planted(*_):
            raise ValueError("planted")

        net[1].register_forward_pre_hook(planted)
        with pytest.raises(ValueError, match="planted"):
            net(torch.ones(1, 4))
        seen = []
        for drop in (net.reshard, lambda: drop_gathered(net)):
            drop()
            seen.append([isinstance(param, DTensor) for param in net.parameters()])
        return seen

    assert everywhere(2, work) == [[[False] * 2, [True] * 2]] * 2


def sharded(mesh, dtype=torch.float32):
    net = Net().to(dtype)
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh)
    return net


def test_takes_means():
    def work(_world):
        net = sharded(init_device_mesh("cpu", (1,)))
        found = [takes_means(Net()), takes_means(net)]
        for module in net.blocks:
            module.set_gradient_divide_factor(1.0)
        found.append(takes_means(net))  # the root still does
        net.set_gradient_divide_factor(1.0)
        return [*found, takes_means(net)]

    assert everywhere(1, work) == [[None, True, True, False]]


SET = {
    "gradient_divide_factor": 3.0,
    "requires_gradient_sync": False,
    "requires_all_reduce": True,
    "reshard_after_forward": False,
    "reshard_after_backward": False,
    "force_sum_reduction_for_comms": True,
    "unshard_in_backward": False,
    "reduce_scatter_unused_params": True,
}
"""Other values than torch's own, in the order in which they are set."""


def test_fsdp_settings():
    def work(_world):
        net = sharded(init_device_mesh("cpu", (1,)))
        first, sends = fsdp_settings(net)
        for name, value in SET.items():
            getattr(net, f"set_{name}")(value)
        net.set_all_reduce_hook(print)
        then, sends_then = fsdp_settings(net)
        inner, _ = fsdp_settings(net.blocks[0])
        return first, then, inner, [name for name, value in sends.items() if sends_then[name] is not value]

    ((first, then, inner, others),) = everywhere(1, work)
    assert then == SET
    assert all(first[name] != value for name, value in SET.items() if name != "requires_all_reduce")
    assert inner["gradient_divide_factor"] is None
    assert (first["reshard_after_forward"], others) == (None, ["all_reduce_hook"])


def test_set_fsdp():
    def work(_world):
        net = sharded(init_device_mesh("cpu", (1,)))
        before, _ = fsdp_settings(net.blocks[0])
        set_fsdp(net, SET)
        return fsdp_settings(net)[0], before == fsdp_settings(net.blocks[0])[0]

    assert everywhere(1, work) == [(SET, True)]


def test_fsdp_reductions():
    def work(_world):
        net = Net()
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "fsdp"))
        fully_shard(net.blocks[0], mesh=mesh)
        fully_shard(net.blocks[1], mesh=mesh["fsdp"]).set_all_reduce_hook(print)
        found = fsdp_reductions(net)
        of = [found.get(id(module.weight), "none") for module in (net.blocks[0][0], net.blocks[1][0], net.out)]
        return of, dist.get_rank()

    for of, rank in everywhere(2, work):
        assert of == [((rank,), (0, 1)), None, "none"]


def five_rows(mesh):
    """On meta: 5 rows over 2 ranks, stored as 3 and 3."""
    with torch.device("meta"):
        net = nn.Linear(4, 5, bias=False)
    fully_shard(net, mesh=mesh)
    return net


def load(net, flat):
    """Hand in the front part of ``flat`` as this rank's shard."""
    shard = net.weight.to_local()
    local = flat[: shard.numel()].view(shard.shape)
    value = DTensor.from_local(
        local, net.weight.device_mesh, net.weight.placements, run_check=False, shape=(5, 4), stride=(4, 1)
    )
    net.load_state_dict({"weight": nn.Parameter(value)}, assign=True)


def test_unreduced():
    def work(_world):
        net = five_rows(init_device_mesh("cpu", (2,)))
        load(net, torch.ones(12))
        seen = []
        for reduced in (False, True):
            net.set_requires_gradient_sync(reduced)
            net(torch.ones(1, 4)).sum().backward()
            seen.append((unreduced(net) == {id(net.weight)}, net.weight.grad is None))
        return seen

    assert everywhere(2, work) == [[(True, True), (False, False)]] * 2


def test_padded_numels():
    def work(_world):
        net = five_rows(init_device_mesh("cpu", (2,)))
        return padded_numels(net), net.weight.to_local().numel()

    assert everywhere(2, work) == [({"weight": 12}, 12), ({"weight": 12}, 8)]


def test_adopt_padded():
    def work(_world):
        mesh, kept = init_device_mesh("cpu", (2,)), []
        for told in (True, False):
            net, flat = five_rows(mesh), torch.ones(12)
            if told:
                adopt_padded(net, {"weight": flat})
            load(net, flat)
            out = net(torch.ones(1, 4))
            out.sum().backward()
            kept.append((net.weight.to_local().data_ptr() == flat.data_ptr(), out.tolist()))
        return kept

    right = [[4.0] * 5]
    full, short = everywhere(2, work)
    assert full == [(True, right), (True, right)]
    assert short == [(True, right), (False, right)]  # untold, FSDP2 copies the short shard out of its storage


def test_reduce_empty_gradients():
    def pack(grads):
        packed = torch.zeros(3)
        fsdp_collectives.foreach_reduce_scatter_copy_in(grads, packed, 1)
        return packed.tolist()

    with pytest.raises(RuntimeError, match="non-empty"):  # torch's own
        torch_private_fsdp._PACK([torch.ones(0, 4), torch.ones(3)], torch.zeros(3), 1)
    reduce_empty_gradients()
    assert pack([torch.ones(0, 4), torch.ones(3)]) == [1.0] * 3
    assert pack([torch.ones(0, 4)]) == [0.0] * 3


def test_share_shard():
    """Two modules over one shard: each gathers it, the gradients of both add up, and an update is seen by both."""

    def work(world):
        mesh = init_device_mesh("cpu", (2,))
        with torch.device("meta"):
            one, other = (torch.nn.Sequential(torch.nn.Linear(3, 5, bias=False)) for _ in range(2))
        for module in (one, other):
            fully_shard([module[0]], mesh=mesh)
            fully_shard(module, mesh=mesh)
        share_shard(other, "0.weight", one[0].weight)
        flat = torch.arange(9.0) + 9 * world.rank  # rank 1 has two rows of five, and the padding of a third
        local = flat[: one[0].weight.to_local().numel()].view(-1, 3)
        value = torch.nn.Parameter(shard_of(one[0].weight, local))
        for module in (one, other):
            adopt_padded(module, {"0.weight": flat})
            module[0].load_state_dict({"weight": value}, assign=True)
        given = torch.ones(1, 3)
        for module, weight in ((one, 1.0), (other, 10.0)):
            (module(given).sum() * weight).backward()
        gradient = local_tensor(value.grad).clone()
        with torch.no_grad():
            local_tensor(value).add_(1)
        seen = [module(given)[0].tolist() for module in (one, other)]
        same = one[0].weight is other[0].weight is value and value.to_local().data_ptr() == flat.data_ptr()
        return same, gradient.unique().tolist(), seen[0] == seen[1], seen[0][0], len(gradient)

    assert everywhere(2, work) == [(True, [11.0], True, 6.0, 3), (True, [11.0], True, 6.0, 2)]
