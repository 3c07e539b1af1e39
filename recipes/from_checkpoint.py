"""A loop that goes on from its newest checkpoint, in whatever layout it is started.

``torchrun --nproc-per-node=2 recipes/from_checkpoint.py fsdp2 checkpoints 10``, then ``... tp2 checkpoints 20``.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dynatrain import Saves, Switcher
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def build(mesh, layout):
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64)).double()
    if layout.size("tp") > 1:
        parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp", "fsdp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_lr(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))


def main(layout="fsdp2", folder="checkpoints", until="10"):
    dist.init_process_group()
    torch.manual_seed(0)
    root = Path(folder)
    sw = Switcher(build, layout=layout, state={"lr": make_lr}, saves=Saves(root=root), data_parallel="free")
    if written := sorted(root.glob("step_*")):  # all that is there is whole: it was renamed into place at the end
        sw.load(written[-1])
    seen = []
    for step in sw.steps(until=int(until)):
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(step))
        data = sw.world.mesh["dp", "fsdp"]
        mine = tokens.chunk(data.size())[data.get_local_rank("dp") * data["fsdp"].size() + data.get_local_rank("fsdp")]
        loss = F.cross_entropy(sw.model(mine), (5 * mine + 1) % 64)
        loss.backward()
        sw.optimizer.step()
        sw.state["lr"].step()
        sw.optimizer.zero_grad()
        loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        seen.append((layout, loss.item()))
    sw.save_now()
    dist.destroy_process_group()
    return seen


if __name__ == "__main__":
    main(*sys.argv[1:])
