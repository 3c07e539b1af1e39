"""Forked ranks for tests of ``Switcher`` in loops that are not ours, and a model that has one of everything."""

import time
import warnings
from datetime import timedelta

import torch
import torch._dynamo  # torch imports it late, in every rank, where the parent has not
import torch.distributed as dist
from tests import ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dynatrain.cluster.board import Board
from dynatrain.cluster.kernel import RANK_PRIORITY, take_realtime
from dynatrain.train.switcher import Switcher


def everywhere(size, work, seconds=60):
    """``work(world)`` on forked ranks that have a default group; what they returned. Fails with the first failure."""
    found = ranks.run(size, lambda world: _inside(world, work), seconds)
    failed = {rank: result for rank, result in enumerate(found) if result is None or isinstance(result, Exception)}
    assert not failed, "\n".join(f"rank {rank}: {result or 'died or hung'}" for rank, result in failed.items())
    return found


def settle_in():
    """What every forked rank does first."""
    warnings.simplefilter("ignore")  # of the fork and of torch's own
    take_realtime(RANK_PRIORITY)


def _inside(world, work):
    settle_in()
    store = dist.PrefixStore("default", world.store)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=30))
    return work(world)


def switcher(world, build, layout, *, name="", **more):
    """A ``Switcher`` with means of its own, so that one process may have several after each other (``name``)."""
    board, groups = (dist.PrefixStore(f"{name}/{what}", world.store.clone()) for what in ("board", "groups"))
    settings = {"deadline": 15.0, "board": Board(board, world.size), "store": groups}
    return Switcher(build, layout=layout, **settings | more)


class Books:
    """A recorder that keeps ``(layout, outcome, reason)`` of every switch."""

    def __init__(self):
        self.ends = []

    def announced(self, order, step):
        pass

    def step_ended(self, now):
        pass

    def ended(self, attempt, outcome, reason, *_):
        self.ends.append((attempt.order.layout, outcome, reason))


def idle(sw, steps):
    """Steps that train nothing but couple all ranks, as every training step does; yields each step's number."""
    for step in sw.steps(until=sw.step + steps):
        yield step
        time.sleep(0.002)  # to the thread that builds, on a busy machine
        dist.barrier()


def until_ended(sw, books, steps=5000):
    """Idle until one more switch has ended; its record."""
    before = len(books.ends)
    for _ in idle(sw, steps):
        flag = torch.tensor(float(len(books.ends) > before))
        dist.all_reduce(flag)
        if flag == dist.get_world_size():
            break
    return books.ends[before:]


def whole(value):
    """The full tensor, detached, plain and copied."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


class Net(nn.Module):
    """Two blocks with rows that nothing divides, a frozen layer, and buffers that are and are not persistent."""

    def __init__(self, width=6, hidden=10):
        super().__init__()
        self.inside = nn.Linear(5, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width)) for _ in range(2)
        )
        self.frozen = nn.Linear(width, width)
        self.out = nn.Linear(width, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.linspace(1, 2, width), persistent=False)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x):
        self.seen += 1
        x = self.inside(x) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.out(self.frozen(x))


def shard(net, mesh):
    """FSDP2 (HSDP) over the data axes, tensor parallelism inside blocks where there is any."""
    if mesh["tp"].size() > 1:
        for block in net.blocks:
            parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    data = mesh["dp", "fsdp"]
    for module in (*net.blocks, net):
        fully_shard(module, mesh=data)
    return net


def groups_of(net):
    """Decayed, not decayed, and none: each with a rate of its own."""
    trained = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [], "lr": 5e-3, "weight_decay": 0.3},
        {"params": [p for p in trained if p.ndim == 1], "lr": 2e-2, "weight_decay": 0.0},
    ]


def build_net(mesh: DeviceMesh, _layout):
    """The ``Switcher``'s build of :class:`Net` in fp64, equal on all ranks."""
    if torch.empty(0).device.type != "meta":
        torch.manual_seed(3)
    net = shard(Net().double(), mesh)
    return net, torch.optim.AdamW(groups_of(net), betas=(0.8, 0.9))


def batch(step, data_rank):
    """fp64 [4, 5] and [4, 3], a function of both numbers."""
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    return torch.randn(4, 5, generator=generator).double(), torch.randn(4, 3, generator=generator).double()


class Shadow:
    """An average whose entries are cut as the parameters are: DTensors, or plain local shards."""

    def __init__(self, model, *, local):
        self.local = local
        self.entries = {name: self._mine(p).clone() for name, p in model.named_parameters()}
        self.notes = {"decay": 0.9, "seen": {"updates": torch.zeros((), dtype=torch.int64)}}

    def _mine(self, p):
        return p.detach().to_local() if self.local else p.detach()

    @torch.no_grad()
    def update(self, model):
        for name, p in model.named_parameters():
            self.entries[name].lerp_(self._mine(p), 1 - self.notes["decay"])
        self.notes["seen"]["updates"] += 1

    def state_dict(self):
        return {"shadow": dict(self.entries), "notes": self.notes}

    def load_state_dict(self, state):
        self.entries, self.notes = dict(state["shadow"]), state["notes"]


class Scaler:
    """Like a gradient scaler: a scalar tensor that is written in place, and a Python number."""

    def __init__(self):
        self.scale, self.good_steps = torch.tensor(1024.0), 0

    def update(self):
        self.good_steps += 1
        if self.good_steps % 3 == 0:
            self.scale *= 2

    def state_dict(self):
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state):
        self.scale, self.good_steps = state["scale"], state["good_steps"]
