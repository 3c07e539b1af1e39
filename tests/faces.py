"""A model with all that a loop may set behind build, builds that are wrong in one way each, and what a loop sets."""

import contextlib
from types import SimpleNamespace

import numpy as np
import torch
from tests.dist.foreign import whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

DATA = ("dp", "fsdp")
DTYPES = ("complex64", "complex128", "uint16", "uint64", "float8_e4m3fn", "float8_e8m0fnu")


class Face(nn.Module):
    """Dropout, a flag of a data-dependent initialisation, a config, a frozen layer, and buffers of rare types."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.1)
        self.frozen = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)).requires_grad_(requires_grad=False)
        self.out = nn.Linear(8, 6)
        self.ready = False
        self.sizes, self.config = (1, 1), SimpleNamespace(aux=False, layers=[1])
        self.inside.config = self.config
        for name in DTYPES:
            self.register_buffer(name, torch.arange(6.0).to(getattr(torch, name)))

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.out.bias.fill_(7.0)
            self.ready = True
        return self.out(self.frozen(self.drop(self.inside(x))))


def nothing(net, layout):
    """No change."""


def build_with(change=nothing, axes=DATA, make=Face, optimizer=torch.optim.AdamW):
    """A build that shards over ``axes``; ``change(net, layout)`` is done last."""

    def build(mesh, layout):
        with torch.random.fork_rng() if torch.empty(0).device.type != "meta" else contextlib.nullcontext():
            net = make()
        fully_shard(net, mesh=mesh[axes])
        change(net, layout)
        return net, optimizer(net.parameters(), lr=1e-2)

    return build


def reversed_mesh(mesh, layout):
    """As a user writes it who makes the mesh himself."""
    net = nn.Linear(4, 8, bias=False)
    mine = DeviceMesh("cpu", [1, 0], mesh_dim_names=("fsdp",)) if layout.size("fsdp") > 1 else mesh[DATA]
    fully_shard(net, mesh=mine)
    return net, torch.optim.SGD(net.parameters())


def on_an_axis_of_its_own(mesh, _layout):
    """Cut over an axis that no layout knows: nothing says where its parts go in the next one."""
    net = nn.Linear(4, 8, bias=False)
    rows = DeviceMesh("cpu", [0, 1], mesh_dim_names=("rows",))
    net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), rows, [Shard(0)]))
    net.other = fully_shard(nn.Linear(2, 2), mesh=mesh[DATA])
    return net, torch.optim.SGD(net.parameters())


def with_a_pending_sum(mesh, _layout):
    net = fully_shard(nn.Linear(4, 8), mesh=mesh[DATA])
    net.register_buffer("total", DTensor.from_local(torch.zeros(4), mesh["fsdp"], [Partial()], run_check=False))
    return net, torch.optim.SGD(net.parameters())


def seeds(mesh, layout):
    torch.manual_seed(0)
    return build_with()(mesh, layout)


def draws(mesh, layout):
    torch.rand(1, device="cpu")
    return build_with()(mesh, layout)


def in_16_bits_for_a_while(mesh, layout):
    """As ``AutoModel.from_config(config)`` does where the config says so."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return build_with(lambda net, _: net.float())(mesh, layout)
    finally:
        torch.set_default_dtype(before)


def at_high_precision(mesh, layout):
    """What stays set from the first build on, and what a thread has for itself, is no trap."""
    torch.set_float32_matmul_precision("high")
    torch.set_default_dtype(torch.get_default_dtype())
    torch.set_grad_enabled(True)
    return build_with()(mesh, layout)


class Attribute(nn.Linear):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__(4, 4)
        self.freqs = torch.arange(4.0)


class Half(nn.Linear):
    """A type that nothing moves."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("table", torch.zeros(3, dtype=torch.complex32))


def facts(sw):
    """What a loop sees of all that it has set."""
    net = sw.model
    return {
        "training": [module.training for module in net.modules()],
        "p": (net.drop.p, net.frozen[1].p),
        "flags": (net.ready, net.note, net.inside.mark, net.sizes),
        "config": (vars(net.config), net.inside.config is net.config),
        "marks": {name: (p.requires_grad, getattr(p, "shared", "")) for name, p in net.named_parameters()},
        "buffers": {name: whole(buffer.view(torch.uint8)) for name, buffer in net.named_buffers()},
    }


def set_up(net):
    """Everything that a loop may set behind build, and no tensor holds."""
    net.frozen.eval()
    net.drop.p = np.float64(0.5)  # as hyperparameter searches have them
    net.sizes, net.config.aux = (2, 2), True
    net.config.layers.append(2)
    net.note, net.inside.mark = "late", 3
    net.out.weight.shared = "all"
    net.inside.bias.requires_grad_(requires_grad=False)  # behind a step, so that AdamW has moments of it
    net.set_gradient_divide_factor(1.0)
    net.set_reshard_after_forward(reshard_after_forward=False)


def put_a_tensor(net):
    net.inside.seen = torch.zeros(3)


def put_a_main_grad(net):
    net.out.weight.main_grad = torch.zeros(3)


def hook_the_reduction(net):
    net.set_all_reduce_hook(lambda grad: grad)


def count_it_otherwise(net):
    net.ways = 5


class Counting(torch.optim.Optimizer):
    """Adam's way to correct its bias, by a count of steps that is a plain number on the optimizer."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})
        self.t = 0

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002 - the face of optimizers
        self.t += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg"].lerp_(param.grad, 0.1)
                    param.sub_(state["exp_avg"] / (1 - 0.9**self.t), alpha=group["lr"])
