"""What the project relies on in torch's private parts: one test for each function of ``train/torch_private.py``."""

import inspect
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.dist.foreign import Net, everywhere, groups_of
from tests.ledgers import registered_groups
from tests.ranks import run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp_collectives
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dynatrain.train import torch_private
from dynatrain.train.torch_private import (
    Lasting,
    adopt_padded,
    clear_dtensor_caches,
    default_store,
    drop_gathered,
    fsdp_reductions,
    fsdp_settings,
    hooks_of,
    local_tensor,
    named_group,
    own_default,
    padded_numels,
    process_groups,
    reduce_empty_gradients,
    scheduled,
    set_buffer,
    set_fsdp,
    shard_of,
    share_shard,
    swap_default,
    takes_means,
    times_written,
    unreduced,
    without_modes,
)

SECONDS = timedelta(seconds=10)


def test_each_function_has_a_test_of_its_name():
    functions = {
        name
        for name, thing in vars(torch_private).items()
        if inspect.isfunction(thing) and thing.__module__ == torch_private.__name__ and not name.startswith("_")
    }
    assert {f"test_{name}" for name in functions} <= set(globals())


def test_named_group():
    def work(world):
        if world.rank == 1:
            named_group("alone", [1], 1, "gloo", world.store, SECONDS)  # members of unequal histories meet by name
        group = named_group("both", [1, 0], world.rank, "gloo", world.store, SECONDS)
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("fsdp",), mesh=[1, 0])
        total = distribute_tensor(torch.ones(2), mesh, [Shard(0)]).sum().full_tensor()
        everyone = torch.tensor([float(world.rank)])
        dist.all_reduce(everyone, group=group)
        return group.rank(), float(everyone), float(total), mesh.get_local_rank()

    assert everywhere(2, work) == [(1, 1.0, 2.0, 1), (0, 1.0, 2.0, 0)]


def test_own_default():
    """A thread sees the world to come, with meshes whose slices lie there; the others see the present one."""

    def work(world):
        there = 3 - world.rank
        group = named_group("next", [0, 1, 2, 3], there, "gloo", world.store, SECONDS)
        rows, columns = ([0, 1], [2, 3]), ([0, 2], [1, 3])
        mine = [next(m for m in ways if there in m) for ways in (columns, rows)]
        groups = [named_group(f"next{m}", m, there, "gloo", world.store, SECONDS) for m in mine]
        seen = []

        def build():
            with own_default(group):
                mesh = DeviceMesh.from_group(groups, "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=("a", "b"))
                seen.extend([dist.get_rank(), mesh.get_coordinate(), mesh["b"].mesh.tolist(), mesh.get_local_rank("a")])
            seen.append(dist.get_rank())

        thread = threading.Thread(target=build)
        with own_default(dist.group.WORLD):
            thread.start()
            thread.join()
        return seen, dist.get_rank()

    assert everywhere(4, work) == [
        ([3 - rank, tuple(divmod(3 - rank, 2)), [2, 3] if rank < 2 else [0, 1], (3 - rank) // 2, rank], rank)
        for rank in range(4)
    ]


def test_swap_default():
    """Two ranks and a newcomer without any group become one world; two of them go back."""

    def total():
        value = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(value)
        return dist.get_rank(), dist.get_world_size(), float(value)

    def work(world):
        if world.rank < 2:
            store = dist.PrefixStore("old", world.store)
            dist.init_process_group("gloo", store=store, rank=world.rank, world_size=2)
        there = (world.rank + 1) % 3
        new = named_group("new", [0, 1, 2], there, "gloo", world.store, SECONDS)
        old = swap_default(new)
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("fsdp",))
        in_new = *total(), float(distribute_tensor(torch.ones(3), mesh, [Shard(0)]).sum().full_tensor())
        if old is None:
            return in_new, None
        swap_default(old)
        dist.destroy_process_group(new)
        return in_new, total()

    found = run(3, work)
    assert [one for one, _ in found] == [(1, 3, 6.0, 3.0), (2, 3, 6.0, 3.0), (0, 3, 6.0, 3.0)]
    assert [other for _, other in found] == [(0, 2, 3.0), (1, 2, 3.0), None]


def test_registered_groups():
    def work(world):
        before = registered_groups()
        group = named_group("more", [0], 0, "gloo", world.store, SECONDS)
        during = registered_groups()
        dist.destroy_process_group(group)
        return before, during, registered_groups()

    assert everywhere(1, work) == [(1, 2, 1)]


def test_process_groups():
    def work(world):
        pair = named_group("pair", [0, 1], world.rank, "gloo", world.store, SECONDS)
        named_group(f"alone{world.rank}", [world.rank], world.rank, "gloo", world.store, SECONDS)
        mine = dist.new_group([0, 1])
        found = process_groups()
        return len(found), {*found} == {dist.group.WORLD, pair, mine}

    assert everywhere(2, work) == [(3, True)] * 2


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


def test_set_buffer():
    module = torch.nn.BatchNorm1d(2)
    value = torch.full((2,), 3.0)
    set_buffer(module, "running_mean", value)
    assert module.running_mean is value
    assert module.state_dict(keep_vars=True)["running_mean"] is value


def test_default_store():
    def work(_world):
        one, other = default_store(), default_store()
        one.set("said", "here")

        def wait_long():
            with pytest.raises(dist.DistStoreError):
                one.wait(["never"], timedelta(seconds=1))

        waiting = threading.Thread(target=wait_long)
        waiting.start()
        time.sleep(0.2)
        began = time.monotonic()
        heard = other.get("said")  # the same keys, and not behind the one that waits
        seconds = time.monotonic() - began
        waiting.join()
        return heard, seconds < 0.7

    assert everywhere(1, work) == [(b"here", True)]


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


def test_times_written():
    tensor = torch.zeros(3)
    before = times_written(tensor)
    tensor[1:].fill_(2.0)
    assert times_written(tensor) > before


def test_scheduled():
    optimizer = torch.optim.AdamW(groups_of(Net()))
    assert not scheduled(optimizer)
    LambdaLR(optimizer, lambda _: 1.0)
    assert scheduled(optimizer)


def test_hooks_of():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    handles = [
        net.register_forward_hook(print, with_kwargs=True, always_call=True),
        net.register_forward_pre_hook(print),
        net.register_full_backward_hook(print),
        net.register_full_backward_pre_hook(print),
        net.register_state_dict_pre_hook(print),
        optimizer.register_step_pre_hook(print),
        optimizer.register_step_post_hook(print),
        optimizer.register_state_dict_post_hook(print),
        net.weight.register_hook(print),
        net.weight.register_post_accumulate_grad_hook(print),
    ]
    found = [hook for owner in (net, optimizer, net.weight) for hook in hooks_of(owner)]
    numbers = [getattr(handle, "id", None) for handle in handles]
    assert {hook.number for hook in found} == {number for number in numbers if number is not None}
    for hook in found:
        if hook.register:
            again = nn.Linear(2, 2) if hasattr(nn.Linear, hook.register) else torch.optim.AdamW(net.parameters())
            getattr(again, hook.register)(hook.call, **hook.options)
            (copy,) = hooks_of(again)
            assert (copy.kind, copy.register, copy.options) == (hook.kind, hook.register, hook.options)
    assert sum(bool(hook.register) for hook in found) == 6
    assert str(found[0]) == "print (forward_hooks)"
    old_style = nn.Linear(2, 2)
    old_style.register_backward_hook(print)
    assert [hook.register for hook in hooks_of(old_style)] == [""]


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
        torch_private._PACK([torch.ones(0, 4), torch.ones(3)], torch.zeros(3), 1)
    reduce_empty_gradients()
    assert pack([torch.ones(0, 4), torch.ones(3)]) == [1.0] * 3
    assert pack([torch.ones(0, 4)]) == [0.0] * 3


def test_local_tensor():
    def work(_world):
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(4.0).requires_grad_()
        shard = distribute_tensor(whole, mesh, [Shard(0)])
        plain, local = local_tensor(whole), local_tensor(shard)
        return local.tolist(), plain.requires_grad, plain.data_ptr() == whole.data_ptr(), local.grad_fn is None

    assert [found[0] for found in everywhere(2, work)] == [[0.0, 1.0], [2.0, 3.0]]
    assert [found[1:] for found in everywhere(2, work)] == [(False, True, True)] * 2


def test_shard_of():
    def work(_world):
        mesh = init_device_mesh("cpu", (2,))
        template = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])  # uneven: 3 and 2
        mine = torch.full_like(local_tensor(template), 1.0 + dist.get_rank())
        made = shard_of(template, mine)
        return (
            made.full_tensor().tolist(),
            made.shape == template.shape,
            local_tensor(made).data_ptr() == mine.data_ptr(),
        )

    assert everywhere(2, work) == [([1.0, 1.0, 1.0, 2.0, 2.0], True, True)] * 2


def test_without_modes():
    class Seen(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        with without_modes():
            torch.ones(2) + 1
        assert not seen.calls
        torch.ones(2)
        assert seen.calls


def test_lasting():
    """Two backwards through one selective checkpoint compute no product again; torch's own context refuses that."""
    mm = torch.ops.aten.mm.default

    def keep(_context, op, *_args, **_options):
        return CheckpointPolicy.MUST_SAVE if op is mm else CheckpointPolicy.PREFER_RECOMPUTE

    def gradients(lasting):
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

        def contexts():
            forward, again = create_selective_checkpoint_contexts(keep)
            return forward, Lasting(again) if lasting else again

        run = checkpoint(lambda x: (x.exp() @ w).sin() @ w, x, use_reentrant=False, context_fn=contexts)
        with Seen() as seen:
            halves = [torch.autograd.grad(run.sum(), leaf, retain_graph=True)[0] for leaf in (x, w)]
        return seen.mm, [*halves, *torch.autograd.grad(((x.exp() @ w).sin() @ w).sum(), (x, w))]

    class Seen(TorchDispatchMode):
        mm = 0

        def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
            self.mm += func is mm
            return func(*args, **(kwargs or {}))

    products, (dx, dw, *expected) = gradients(lasting=True)
    assert torch.equal(dx, expected[0])
    assert torch.equal(dw, expected[1])
    assert products == 2 + 3  # those of two gradients: forward's own none
    with pytest.raises(RuntimeError, match="backward an extra time"):
        gradients(lasting=False)


def test_clear_dtensor_caches():
    def reduce_twice(world, *, clear):
        for turn in range(2):
            group = named_group(f"turn{turn}", [0, 1], world.rank, "gloo", world.store, SECONDS)
            mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("fsdp",), mesh=[0, 1])
            value = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
            try:
                total = float((value * 2).redistribute(mesh, [Replicate()]).sum().to_local())
            except Exception as error:  # noqa: BLE001 - its text is what is tested
                return str(error)
            if clear:
                clear_dtensor_caches()
            dist.destroy_process_group(group)
        return total

    assert everywhere(2, lambda world: reduce_twice(world, clear=True)) == [8.0, 8.0]
    for text in everywhere(2, lambda world: reduce_twice(world, clear=False)):
        assert "process group" in str(text)


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
