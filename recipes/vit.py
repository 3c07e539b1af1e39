"""A small vision transformer under FSDP2 and tensor parallelism, whose layout changes while it trains.

``torchrun --nproc-per-node=2 recipes/vit.py``. It learns which quarter of an image is bright.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dynatrain import Switcher
from dynatrain.layout.text import print_layout
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS, BATCH, IMAGE, PATCH, WIDTH, HEADS = 12, 8, 8, 2, 16, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        # Under tp a rank has some of the heads: their number is read off, their width is fixed.
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.place = nn.Parameter(torch.zeros(1 + (IMAGE // PATCH) ** 2, WIDTH))
        self.summary = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.summary.expand(len(x), 1, -1), x], 1) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def build(mesh, layout):
    model = ViT().double()
    columns, rows = ("attention.q", "attention.k", "attention.v", "up"), ("attention.out", "down")
    for block in model.blocks:
        if layout.size("tp") > 1:
            plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
            parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp", "fsdp"])
    fully_shard(model, mesh=mesh["dp", "fsdp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step, mesh):
    """This data rank's share of the step's images; the whole batch is the same in every layout."""
    draw = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 1, IMAGE, IMAGE, generator=draw).double() / 4
    labels = torch.randint(4, (BATCH,), generator=draw)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0].unflatten(0, (2, -1)).unflatten(2, (2, -1))[label // 2, :, label % 2] += 2
    data = mesh["dp", "fsdp"]
    number, share = data.get_local_rank("dp") * data["fsdp"].size() + data.get_local_rank("fsdp"), BATCH // data.size()
    return images[number * share :][:share], labels[number * share :][:share]


def main(layout="fsdp2", switches=((4, "tp2"), (8, "fsdp2"))):
    dist.init_process_group()
    torch.manual_seed(0)
    sw = Switcher(build, layout=layout, schedule=dict(switches), data_parallel="free")
    seen = []
    for step in sw.steps(until=STEPS):
        images, labels = batch(step, sw.world.mesh)
        loss = F.cross_entropy(sw.model(images), labels)
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
    main()
