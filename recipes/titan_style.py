"""A decoder parallelised by torchtitan's kind of functions, PP + FSDP2 + TP, whose layout changes while it trains.

``torchrun --nproc-per-node=4 recipes/titan_style.py``. Layers keep their global numbers in every stage, as there.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dynatrain import Switcher
from dynatrain.layout.stages import stage_ranges
from dynatrain.layout.text import print_layout
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS, BATCH, LENGTH, VOCAB, WIDTH, HEADS, LAYERS, MICRO_BATCHES = 12, 8, 6, 32, 16, 4, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.w2 = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x):
        h = self.attention_norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({str(n): Block() for n in range(LAYERS)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x):
        x = self.tok_embeddings(x) if self.tok_embeddings else x
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x)) if self.output else x


def pipeline(model, mesh, layout):
    """Leave of the whole model what this rank's stage has."""
    stage, last = mesh.get_local_rank("pp"), layout.size("pp") - 1
    mine = {str(n) for n in stage_ranges(layout, LAYERS)[stage]}
    for name in set(model.layers) - mine:
        del model.layers[name]
    if stage > 0:
        model.tok_embeddings = None
    if stage < last:
        model.norm = model.output = None


def apply_tp(model, mesh):
    whole = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, {name: style for name, style in whole.items() if getattr(model, name)})
    for layer in model.layers.values():
        plan = {name: ColwiseParallel() for name in ("wq", "wk", "wv", "w1", "w3")}
        parallelize_module(layer, mesh, plan | {"wo": RowwiseParallel(), "w2": RowwiseParallel()})


def apply_fsdp(model, mesh):
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gradients are sums; the loss is divided by the tokens of the global batch
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def build(mesh, layout):
    model = Transformer().double()
    pipeline(model, mesh, layout)
    if layout.size("tp") > 1:
        apply_tp(model, mesh["tp"])
    apply_fsdp(model, mesh["dp", "fsdp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step, mesh):
    """This data rank's share of the step's tokens; the whole batch is the same in every layout."""
    first = torch.randint(VOCAB, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (first + torch.arange(LENGTH + 1) * 3) % VOCAB
    data = mesh["dp", "fsdp"]
    number, share = data.get_local_rank("dp") * data["fsdp"].size() + data.get_local_rank("fsdp"), BATCH // data.size()
    mine = tokens[number * share :][:share]
    return mine[:, :-1], mine[:, 1:]


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * LENGTH)


def make_schedule(model, mesh):
    group = mesh.get_group("pp")
    stage = PipelineStage(model, group.rank(), group.size(), torch.device("cpu"), group=group)
    return Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)


def forward_backward(sw, schedule, inputs, targets):
    """The sum of this rank's losses, zero where its stage is not the last."""
    if schedule is None:
        loss = loss_of(sw.model(inputs), targets)
        loss.backward()
        return loss.detach()
    losses = []
    first, last = sw.model.tok_embeddings is not None, sw.model.output is not None
    schedule.step(*([inputs] if first else []), target=targets if last else None, losses=losses if last else None)
    return torch.stack(losses).sum().detach() if last else torch.zeros((), dtype=torch.float64)


def main(layout="fsdp4", switches=((3, "pp2.fsdp2"), (6, "fsdp2.tp2"), (9, "pp2.tp2"))):
    dist.init_process_group()
    torch.manual_seed(0)
    sw = Switcher(build, layout=layout, schedule=dict(switches), data_parallel="free")
    seen, model, schedule = [], None, None
    for step in sw.steps(until=STEPS):
        if sw.model is not model:  # a switch makes new modules: what hangs on them is made anew, too
            model = sw.model
            schedule = make_schedule(model, sw.world.mesh) if sw.layout.size("pp") > 1 else None
        inputs, targets = batch(step, sw.world.mesh)
        loss = forward_backward(sw, schedule, inputs, targets) / sw.layout.size("tp")
        sw.optimizer.step()
        sw.optimizer.zero_grad()
        dist.all_reduce(loss)
        seen.append((print_layout(sw.layout), loss.item()))
        if dist.get_rank() == 0:
            sys.stdout.write(f"step {step} {print_layout(sw.layout)} loss {loss:.15f}\n")
    dist.destroy_process_group()
    return seen


if __name__ == "__main__":
    main()
