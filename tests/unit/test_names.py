"""One canonical name for a tensor, whatever is wrapped around its module, in whatever order (L1, L2, L7)."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dynatrain.models.names import strip_wrappers
from dynatrain.train.live import UnplacedTensorError, entries


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Block(nn.Module):
    """Its submodules are called as wrappers call theirs, and are not wrapped."""

    def __init__(self):
        super().__init__()
        self.module, self.down = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.register_buffer("_orig_mod", torch.zeros(1))

    def forward(self, x):
        return self.down(self.module(x)) + self._orig_mod


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(2, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


AROUND = {
    "checkpoint": checkpoint_wrapper,
    "compile": lambda module: torch.compile(module, backend="eager"),
    "ddp": DistributedDataParallel,
    "dp": nn.DataParallel,
}
ORDERS = [
    order
    for length in range(4)
    for order in itertools.product(("checkpoint", "compile"), repeat=length)
    if order.count("compile") < 2  # torch refuses to compile a module twice
]


def wrapped(module, order):
    """``module`` inside the wrappers, the first innermost."""
    for name in order:
        module = AROUND[name](module)
    return module


def named(part):
    tensors = [*part.named_parameters(), *part.named_buffers()]
    return [strip_wrappers(part, path) for path, _ in tensors]


PLAIN = [path for path, _ in (*Model().named_parameters(), *Model().named_buffers())]


@pytest.mark.parametrize("outside", ["nothing", "ddp", "dp", "fully_shard"])
def test_any_nesting_around_blocks_and_around_the_whole_leaves_the_plain_names(mesh, outside):
    for inside, around in itertools.product(ORDERS, ORDERS):
        model = Model()
        for number, block in enumerate(model.blocks):
            model.blocks[number] = wrapped(block, inside)
            if outside == "fully_shard":
                fully_shard(model.blocks[number], mesh=mesh)
        model = wrapped(model, around)
        if outside == "fully_shard":
            fully_shard(model, mesh=mesh)
        elif outside != "nothing":
            model = wrapped(model, (outside, *inside[:1]))
        assert named(model) == PLAIN, (inside, around)


def test_names_are_the_same_before_and_after_a_block_is_compiled_in_place_and_has_run(mesh):
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    before = named(model)
    for block in model.blocks:
        block.compile(backend="eager")
    model(torch.ones(1, 2)).sum().backward()

    assert isinstance(model.blocks[0], FSDPModule)
    assert before == named(model) == PLAIN


def test_several_parts_are_one_space_of_names_whatever_is_around_each_of_them():
    """Two chunks of a pipeline rank: layers that are numbered alike are told apart by a rule, or refused by name."""
    chunks = [wrapped(Model(), order) for order in (("checkpoint", "compile"), ("compile",))]

    def numbered(part, path):
        return f"chunk{chunks.index(part)}.{strip_wrappers(part, path)}"

    assert list(entries(chunks, numbered)) == [f"chunk{number}.{name}" for number in (0, 1) for name in PLAIN]
    with pytest.raises(UnplacedTensorError, match=r"two tensors are called blocks\.0\.") as refused:
        entries(chunks, strip_wrappers)
    assert "Switcher(names=...)" in str(refused.value)


@pytest.mark.usefixtures("mesh")
def test_a_rule_of_ones_own_sees_through_ddp():
    """L7: what a map of names is keyed by are the plain names, not DDP's."""
    adapters = {"blocks.0.down.weight": "adapter"}
    model = wrapped(Model(), ("checkpoint", "ddp"))

    def rule(part, path):
        name = strip_wrappers(part, path)
        return adapters.get(name, name)

    assert "adapter" in entries([model], rule)
