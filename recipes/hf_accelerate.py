"""A loop of Hugging Face's ``accelerate``, unchanged, over a model whose layout changes while it trains.

``torchrun --nproc-per-node=2 recipes/hf_accelerate.py``; needs ``accelerate``. With ``plain`` behind it, the same loop
trains under accelerate's own DDP. accelerate deals batches out over all ranks, so layouts are of dp and fsdp.
"""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from dynatrain import Switcher, stand_ins
from dynatrain.layout.text import print_layout
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

WIDTH, VOCAB, ACCUMULATED = 32, 48, 2


def loop(accelerator, model, optimizer, loader, scheduler):
    """The very loop that trains without us."""
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        accelerator.print(f"loss {losses[-1]:.15f}")
    return losses


def make_model():
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, VOCAB)).double()


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_lr(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))


def build(mesh, _layout):
    model = fully_shard(make_model(), mesh=mesh["dp", "fsdp"])
    return model, make_optimizer(model)


def samples():
    tokens = torch.randint(VOCAB, (144,), generator=torch.Generator().manual_seed(0)).tolist()
    return [(token, (5 * token + 1) % VOCAB) for token in tokens]


def main(how="switched", layout="fsdp2", switches=((3, "dp2"), (6, "fsdp2"))):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    torch.manual_seed(0)
    layouts = []
    if how == "plain":
        model = make_model()
        optimizer = make_optimizer(model)
        scheduler = make_lr(optimizer)
    else:
        sw = Switcher(build, layout=layout, schedule=dict(switches), state={"lr": make_lr})
        model, optimizer, scheduler = stand_ins(sw, "lr")
        sw.optimizer.register_step_post_hook(lambda *_: layouts.append(print_layout(sw.layout)))
    prepared = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=4), scheduler)
    losses = loop(accelerator, *prepared)
    accelerator.end_training()
    return layouts, losses


if __name__ == "__main__":
    main(*sys.argv[1:])
