"""Low-rank adapters (LoRA) of a small module of one's own on a frozen model, whose layout changes while they train.

``torchrun --nproc-per-node=2 recipes/lora.py``. Blocks are checkpointed, sharded by FSDP2 and tensor parallelism.
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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS, BATCH, VOCAB, WIDTH = 12, 32, 48, 16


class Adapted(nn.Module):
    """A frozen linear layer and what it learns: of rank 4, and nothing at first."""

    def __init__(self, inside, outside):
        super().__init__()
        self.base = nn.Linear(inside, outside)
        self.down, self.up = nn.Linear(inside, 4, bias=False), nn.Linear(4, outside, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(WIDTH), Adapted(WIDTH, 4 * WIDTH), Adapted(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.two(F.gelu(self.one(self.norm(x))))


def is_adapter(name):
    return ".up." in name or ".down." in name


def build(mesh, layout):
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCAB)).double()
    for name, param in model.named_parameters():
        param.requires_grad_(is_adapter(name))
    plan = {"one.base": ColwiseParallel(), "one.up": ColwiseParallel()}
    plan |= {"two.base": RowwiseParallel(), "two.down": RowwiseParallel()}
    for number in (1, 2):
        if layout.size("tp") > 1:
            parallelize_module(model[number], mesh["tp"], plan)
        model[number] = fully_shard(checkpoint_wrapper(model[number]), mesh=mesh["dp", "fsdp"])
    fully_shard(model, mesh=mesh["dp", "fsdp"])
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)


def batch(step, mesh):
    """This data rank's share of the step's tokens; the whole batch is the same in every layout."""
    tokens = torch.randint(VOCAB, (BATCH,), generator=torch.Generator().manual_seed(step))
    data = mesh["dp", "fsdp"]
    number, share = data.get_local_rank("dp") * data["fsdp"].size() + data.get_local_rank("fsdp"), BATCH // data.size()
    mine = tokens[number * share :][:share]
    return mine, (5 * mine + 1) % VOCAB


def adapters(model):
    """All adapters, whole: what one saves of such a run."""
    held = {name: value for name, value in model.state_dict().items() if is_adapter(name)}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in held.items()}


def main(layout="fsdp2", switches=((4, "tp2"), (8, "dp2")), path=None):
    dist.init_process_group()
    torch.manual_seed(0)
    sw = Switcher(build, layout=layout, schedule=dict(switches), data_parallel="free")
    seen = []
    for step in sw.steps(until=STEPS):
        tokens, targets = batch(step, sw.world.mesh)
        loss = F.cross_entropy(sw.model(tokens), targets)
        loss.backward()
        sw.optimizer.step()
        sw.optimizer.zero_grad()
        loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        seen.append((print_layout(sw.layout), loss.item()))
        if dist.get_rank() == 0:
            sys.stdout.write(f"step {step} {print_layout(sw.layout)} loss {loss:.15f}\n")
    learned = adapters(sw.model)
    if path and dist.get_rank() == 0:
        torch.save(learned, path)
    dist.destroy_process_group()
    return seen


if __name__ == "__main__":
    main()
