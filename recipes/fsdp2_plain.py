"""One FSDP2 training loop, plain (``fsdp2_plain.py``) and with a layout that changes (``fsdp2_switched.py``).

Compare them: ``diff recipes/fsdp2_plain.py recipes/fsdp2_switched.py``. Run one, the losses are the same:
``torchrun --nproc-per-node=4 recipes/fsdp2_switched.py``.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

STEPS, WIDTH, VOCAB = 24, 32, 64


def make_block():
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(make_block() for _ in range(3))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class EMA:
    def __init__(self, model):
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)

    def state_dict(self):
        return dict(self.shadow)

    def load_state_dict(self, state):
        self.shadow = dict(state)


def make_lr(optimizer):
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))


def batch(step, rank):
    tokens = torch.randint(VOCAB, (64,), generator=torch.Generator().manual_seed(1000 * step + rank))
    return tokens, (5 * tokens + 1) % VOCAB


def main():
    dist.init_process_group()
    torch.manual_seed(0)
    calls = []

    def count(*_):
        calls.append(1)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model().double()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = make_lr(optimizer)
    ema = EMA(model)
    model.blocks[0].register_forward_hook(count)
    for step in range(STEPS):
        inputs, targets = batch(step, dist.get_rank())
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        ema.update(model)
        loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        average = sum(shadow.full_tensor().norm() for shadow in ema.shadow.values())
        if dist.get_rank() == 0:
            sys.stdout.write(f"step {step} loss {loss:.15f} norm {norm:.15f} ema {average:.15f} calls {len(calls)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
