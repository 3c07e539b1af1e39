"""What the project relies on in torch's private parts: one test for each function of ``train/torch_private.py``."""

import inspect
import threading
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.dist import test_torch_private_fsdp
from tests.dist.foreign import Net, everywhere, groups_of
from tests.ledgers import registered_groups
from tests.ranks import run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dynatrain.train import torch_private, torch_private_fsdp
from dynatrain.train.torch_private import (
    Lasting,
    clear_dtensor_caches,
    default_store,
    hooks_of,
    local_tensor,
    named_group,
    own_default,
    process_groups,
    scheduled,
    set_buffer,
    set_for_a_while,
    shard_of,
    sharing_decisions,
    swap_default,
    takes_foreach,
    times_written,
    without_modes,
)

SECONDS = timedelta(seconds=10)


def test_each_function_has_a_test_of_its_name():
    functions = {
        name
        for module in (torch_private, torch_private_fsdp)
        for name, thing in vars(module).items()
        if inspect.isfunction(thing) and thing.__module__ == module.__name__ and not name.startswith("_")
    }
    assert {f"test_{name}" for name in functions} <= globals().keys() | vars(test_torch_private_fsdp).keys()


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


def test_set_for_a_while():
    bf16, usual = torch.bfloat16, torch.get_default_dtype()
    try:
        with set_for_a_while() as told:
            torch.set_default_dtype(bf16)
            torch.use_deterministic_algorithms(True)
            torch.set_float32_matmul_precision("highest")
            torch.use_deterministic_algorithms(False)
            torch.set_default_dtype(usual)
        assert told == ["default dtype to torch.bfloat16", "deterministic algorithms to True"]

        with set_for_a_while() as told:  # what another thread sets is none of this one's
            thread = threading.Thread(target=lambda: (torch.set_default_dtype(bf16), torch.set_default_dtype(usual)))
            thread.start()
            thread.join()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it is deprecated
                torch.set_default_tensor_type(torch.DoubleTensor)  # and what stays is set but once
        assert told == []
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(usual)


def test_which_of_torchs_settings_are_one_for_all_threads():
    """What ``build`` may set for a while in its thread, and what not."""

    def elsewhere(act, look):
        acted, looked = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda: (act(), acted.set(), looked.wait(10)))
        before = look()
        thread.start()
        assert acted.wait(10)
        after = look()
        looked.set()
        thread.join()
        return after != before

    usual = torch.get_default_dtype()
    try:
        assert elsewhere(lambda: torch.set_default_dtype(torch.bfloat16), lambda: torch.zeros(1).dtype)
        assert elsewhere(lambda: torch.use_deterministic_algorithms(True), torch.are_deterministic_algorithms_enabled)
        assert elsewhere(lambda: torch.set_float32_matmul_precision("medium"), torch.get_float32_matmul_precision)
    finally:
        torch.set_default_dtype(usual)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
    assert not elsewhere(lambda: torch.set_default_device("meta"), lambda: torch.zeros(1).device)
    assert not elsewhere(lambda: torch.device("meta").__enter__(), lambda: torch.zeros(1).device)
    assert not elsewhere(lambda: torch.set_grad_enabled(False), torch.is_grad_enabled)
    assert not elsewhere(lambda: torch.autocast("cpu").__enter__(), lambda: torch.is_autocast_enabled("cpu"))


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


def test_sharing_decisions():
    def work(_world):
        mesh = init_device_mesh("cpu", (2,))
        mine, found = distribute_tensor(torch.ones(6), mesh, [Shard(0)]), []

        def add(number):
            torch._foreach_add([mine, mine], number)

        clear_dtensor_caches()
        with sharing_decisions():
            add(1.0)
        decisions = torch_private._propagator().propagate_op_sharding_non_cached
        decide, decisions.decide = decisions.decide, lambda schema: found.append(str(schema.op)) or decide(schema)
        with sharing_decisions():
            assert torch_private._propagator().propagate_op_sharding_non_cached is decisions
        for shared in (True, False):
            beside = threading.Thread(target=add, args=(1.0,))
            beside.start()
            beside.join()
            assert bool(found) != shared
            clear_dtensor_caches()
        assert not decisions.known  # outside nothing is kept
        return found

    assert everywhere(2, work) == [["aten._foreach_add.Scalar"]] * 2


def test_takes_foreach():
    assert not takes_foreach([torch.ones(2)])  # on a processor a loop is as good
    assert torch.optim.AdamW([torch.ones(2)]).param_groups[0]["foreach"] is None


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
