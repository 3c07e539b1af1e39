"""Hand-sharded modules in Megatron's style, whose layout changes while they train.

``torchrun --nproc-per-node=2 recipes/megatron_style.py``. Parameters are plain tensors, each one tp rank's part, marked
by ``partition_dim`` as Megatron marks them; messages are written by hand. Queries, keys and values lie in one weight,
group by group; gate and up in one, a part of each on every rank; the vocabulary is padded to a multiple of 4 x tp.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dynatrain import Switcher
from dynatrain.layout.text import print_layout
from torch import nn

STEPS, BATCH, LENGTH, VOCAB, WIDTH, GROUPS, HEAD, INNER = 9, 8, 6, 37, 16, 2, 4, 24
SEGMENTS = {"fc1": {"gate": INNER, "up": INNER}}
PADDED = {"embed": VOCAB, "head": VOCAB}


class Enter(torch.autograd.Function):
    """Into a block that tp shares: its input is the same on all ranks, of the gradient each has a share."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    """Out of it: each rank has a share of the sum."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Gather(torch.autograd.Function):
    """Columns of all ranks, one behind the other."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.place, ctx.columns = group.rank(), x.shape[-1]
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.narrow(-1, ctx.place * ctx.columns, ctx.columns).contiguous(), None


def part(group, dim, *wholes):
    """This tp rank's parts of ``wholes``, in one parameter; drawn whole, so that every layout begins alike."""
    held = torch.cat([whole.chunk(group.size(), dim)[group.rank()] for whole in wholes], dim)
    param = nn.Parameter(held.clone())
    param.partition_dim = dim
    return param


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64) / 4


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group, rows = group, 4 * HEAD  # of a group: two heads of queries, one of keys, one of values
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH).double(), nn.LayerNorm(WIDTH).double()
        self.qkv = part(group, 0, drawn(GROUPS * rows, WIDTH))
        self.proj = part(group, 1, drawn(WIDTH, GROUPS * 2 * HEAD))
        self.fc1 = part(group, 0, drawn(INNER, WIDTH), drawn(INNER, WIDTH))
        self.fc2 = part(group, 1, drawn(WIDTH, INNER))

    def forward(self, x):
        h = F.linear(Enter.apply(self.norm1(x), self.group), self.qkv).unflatten(-1, (-1, 4, HEAD))
        q, k, v = (t.flatten(2, 3).transpose(1, 2) for t in h.split([2, 1, 1], -2))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        x = x + Leave.apply(F.linear(h, self.proj), self.group)
        gate, up = F.linear(Enter.apply(self.norm2(x), self.group), self.fc1).chunk(2, -1)
        return x + Leave.apply(F.linear(F.silu(gate) * up, self.fc2), self.group)


class GPT(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group, multiple = group, 4 * group.size()
        padding = torch.zeros(-VOCAB % multiple, WIDTH, dtype=torch.float64)
        self.embed = part(group, 0, torch.cat([drawn(VOCAB, WIDTH), padding]))
        self.blocks = nn.ModuleList(Block(group) for _ in range(2))
        self.head = part(group, 0, torch.cat([drawn(VOCAB, WIDTH), padding]))

    def forward(self, tokens):
        local = tokens - self.group.rank() * len(self.embed)
        mine = (local >= 0) & (local < len(self.embed))
        x = F.embedding(local * mine, self.embed) * mine.unsqueeze(-1)
        x = Leave.apply(x, self.group)
        for block in self.blocks:
            x = block(x)
        return Gather.apply(F.linear(Enter.apply(x, self.group), self.head), self.group)[..., :VOCAB]


def build(mesh, _layout):
    model = GPT(mesh.get_group("tp"))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def sharded(model):
    """Megatron's marks, as ``Switcher`` takes them."""
    return {name: p.partition_dim for name, p in model.named_parameters() if hasattr(p, "partition_dim")}


def reduce_gradients(model, mesh):
    """Mean over the data ranks; the norm counts what all tp ranks hold once."""
    squares = torch.zeros((), dtype=torch.float64)
    for param in model.parameters():
        dist.all_reduce(param.grad, group=mesh.get_group("dp"))
        param.grad /= mesh["dp"].size()
        if hasattr(param, "partition_dim") or mesh.get_local_rank("tp") == 0:
            squares += param.grad.square().sum()
    dist.all_reduce(squares, group=mesh.get_group("tp"))
    for param in model.parameters():
        param.grad *= min(1.0, 1.0 / squares.sqrt().item())


def batch(step, mesh):
    """This data rank's share of the step's tokens; the whole batch is the same in every layout."""
    first = torch.randint(VOCAB, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (first + torch.arange(LENGTH + 1) * 3) % VOCAB
    share = BATCH // mesh["dp"].size()
    mine = tokens[mesh.get_local_rank("dp") * share :][:share]
    return mine[:, :-1], mine[:, 1:]


def main(layout="dp2", switches=((3, "tp2"), (6, "dp2"))):
    dist.init_process_group()
    torch.manual_seed(0)
    one = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with torch.device("meta"):
        marks = sharded(GPT(one))
    sw = Switcher(
        build,
        layout=layout,
        schedule=dict(switches),
        sharded=marks,
        segments=SEGMENTS,
        padded=PADDED,
        data_parallel="free",
    )
    seen = []
    for step in sw.steps(until=STEPS):
        inputs, targets = batch(step, sw.world.mesh)
        loss = F.cross_entropy(sw.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        reduce_gradients(sw.model, sw.world.mesh)
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
