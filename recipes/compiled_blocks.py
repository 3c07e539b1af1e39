"""Blocks that are compiled, checkpointed and drop activations, under FSDP2, whose layout changes while they train.

``torchrun --nproc-per-node=2 recipes/compiled_blocks.py``; another backend of ``torch.compile`` may follow. A layout
that comes again finds its code.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dynatrain import Switcher
from dynatrain.layout.text import print_layout
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

STEPS, BATCH, VOCAB, WIDTH = 9, 16, 48, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def make_build(backend):
    def build(mesh, _layout):
        model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCAB)).double()
        for number in (1, 2):
            block = torch.compile(model[number], backend=backend)
            model[number] = fully_shard(checkpoint_wrapper(block), mesh=mesh["dp", "fsdp"])
        fully_shard(model, mesh=mesh["dp", "fsdp"])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    return build


def batch(step):
    """This rank's tokens and what follows them."""
    tokens = torch.randint(VOCAB, (BATCH,), generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    return tokens, (5 * tokens + 1) % VOCAB


def main(backend="inductor", layout="fsdp2", switches=((3, "dp2"), (6, "fsdp2"))):
    dist.init_process_group()
    torch.manual_seed(0)
    sw = Switcher(make_build(backend), layout=layout, schedule=dict(switches))
    seen = []
    for step in sw.steps(until=STEPS):
        tokens, targets = batch(step)
        loss = F.cross_entropy(sw.model(tokens), targets)
        loss.backward()
        sw.optimizer.step()
        sw.optimizer.zero_grad()
        loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        seen.append((print_layout(sw.layout), loss.item()))
        if dist.get_rank() == 0:
            sys.stdout.write(f"step {step} {print_layout(sw.layout)} loss {loss:.15f}\n")
    dist.destroy_process_group()
    return seen


if __name__ == "__main__":
    main(*sys.argv[1:])
