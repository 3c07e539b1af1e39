"""The job whose checkpoint is kept in ``fixtures/checkpoint_v1``: what the first schema wrote can be read for ever.

The folder was written by ``python -m tests.checkpoint_v1`` and is never written again: a new schema gets a fixture and
a file like this one of its own. Every element is a function of its tensor's and its state's name and of its index.
"""

import random
import sys
from pathlib import Path

import numpy as np
import torch
from tests.jobs import everywhere, meeting
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import LambdaLR

from dynatrain.train.saving import Saves
from dynatrain.train.switcher import Switcher
from dynatrain.train.torch_private import local_tensor

FOLDER = Path(__file__).parent / "fixtures" / "checkpoint_v1"
LAYOUT, RANKS, STEP = "fsdp2.tp2", 4, 11
SHAPES = {"embed.weight": (13, 6), "down.weight": (6, 10), "norm.weight": (6,), "seen": (6,)}
STATES = ("param", "exp_avg", "exp_avg_sq", "step", "ema.shadow", "mean.local")
RATE = 0.0625


def value(name, state):
    """A whole state, as the checkpoint has it."""
    place = 1000 * list(SHAPES).index(name)
    if state == "step":
        return torch.tensor(float(place + STEP))
    if state == "buffer":
        return place + torch.arange(6)
    number = torch.arange(torch.Size(SHAPES[name]).numel(), dtype=torch.float32).reshape(SHAPES[name])
    return place + number + (1 + STATES.index(state)) / 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.down = nn.Linear(10, 6, bias=False)
        self.norm = nn.RMSNorm(6)
        self.register_buffer("seen", torch.zeros(6, dtype=torch.int64))


def build(mesh, layout):
    net = Net()
    if layout.size("tp") > 1:
        parallelize_module(net, mesh["tp"], {"embed": RowwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["fsdp"])
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.25},
        {"params": [net.norm.weight], "weight_decay": 0.0},
    ]
    return net, torch.optim.AdamW(groups, lr=RATE, betas=(0.5, 0.75))


class Average:
    """Keeps something for every parameter: a DTensor like it, or the plain shard."""

    def __init__(self, net, key, *, local):
        self.key, self.updates = key, 0
        values = {name: p.detach().clone() for name, p in net.named_parameters()}
        self.held = {name: local_tensor(v) if local else v for name, v in values.items()}

    def state_dict(self):
        return {self.key: dict(self.held), "updates": self.updates}

    def load_state_dict(self, state):
        self.held, self.updates = dict(state[self.key]), state["updates"]


class Scaler:
    def __init__(self):
        self.scale = torch.tensor(1.0)

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, state):
        self.scale = state["scale"].clone()


def job(world, layout, **more):
    """The job's ``Switcher``, with all that is registered."""
    sw = Switcher(
        build,
        layout=layout,
        data_parallel="own",
        state={"schedule": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)), "scaler": Scaler()},
        **meeting(world) | more,
    )
    sw.register("ema", Average(sw.model, "shadow", local=False))
    sw.register("mean", Average(sw.model, "local", local=True))
    return sw


def write(world, root):
    """Save the job with its stamps, as at step :data:`STEP`."""
    sw = job(world, LAYOUT, saves=Saves(root=root, run_id="fixture"))
    tensors = {tensor.name: tensor for tensor in sw.world.catalogue}
    for (name, state), mine in sw.world.values().items():
        box = sw.world.ownership.box(tensors[name], world.rank) if mine.ndim else ()
        mine.copy_(value(name, state)[tuple(slice(*ends) for ends in box)])
    for _ in range(STEP):
        sw.state["schedule"].step()
    sw.state["scaler"].scale.fill_(512.0)
    sw.state["ema"].updates = sw.state["mean"].updates = 3
    sw.step = STEP
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + world.rank)
    return sw.save_now()


if __name__ == "__main__":
    assert not FOLDER.exists(), f"{FOLDER} is never written again"
    torch.set_num_threads(1)
    sys.stdout.write(f"{everywhere(RANKS, lambda world: write(world, FOLDER))[0]}\n")
