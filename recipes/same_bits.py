"""Holds every element of all state before each edge against the same element behind it, with PyTorch's means alone.

``torchrun --nproc-per-node=2 recipes/same_bits.py``
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dynatrain import Switcher
from dynatrain.layout.text import print_layout
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def build(mesh, layout):
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 130), nn.GELU(), nn.Linear(130, 64))
    if layout.size("tp") > 1:
        parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp", "fsdp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def everything(sw):
    """Parameters, moments and counters, each put together from all ranks."""
    found = {}
    for name, param in sw.model.named_parameters():
        for state, value in {"param": param, **sw.optimizer.state[param]}.items():
            found[name, state] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return found


def main(layout="fsdp2", switches=((3, "tp2"), (6, "dp2"), (9, "fsdp2"))):
    dist.init_process_group()
    torch.manual_seed(0)
    sw = Switcher(build, layout=layout, schedule=dict(switches), data_parallel="free")
    seen, before = [], everything(sw)
    for step in sw.steps(until=12):
        behind = everything(sw)
        equal = behind.keys() == before.keys() and all(torch.equal(behind[key], before[key]) for key in before)
        seen.append((print_layout(sw.layout), equal, len(behind)))
        if dist.get_rank() == 0:
            sys.stdout.write(f"step {step} {print_layout(sw.layout)}: {len(behind)} tensors, equal {equal}\n")
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(step))
        F.cross_entropy(sw.model(tokens), (5 * tokens + 1) % 64).backward()
        sw.optimizer.step()
        sw.optimizer.zero_grad()
        before = everything(sw)
    dist.destroy_process_group()
    return seen


if __name__ == "__main__":
    main()
