"""Every optimizer on parameters that fsdp and tp cut unevenly computes what one process computes."""

import pytest
import torch
from tests.dist.foreign import everywhere
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor import distribute_tensor

from dynatrain.space.box import whole, within
from dynatrain.train.optimizers.adafactor import Adafactor
from dynatrain.train.optimizers.adamw8bit import AdamW8bit
from dynatrain.train.optimizers.muon import Muon
from dynatrain.train.optimizers.schema import kept
from dynatrain.train.optimizers.shard import Shard
from dynatrain.train.torch_private import local_tensor, shard_of

SHAPES = {"rows": (7, 5), "columns": (5, 300), "few": (3, 2), "stack": (5, 3, 4), "vector": (6,)}
"""Uneven in every cut, some with empty shards on four ranks, and blocks of 256 that shards break."""
TP = {"rows": 0, "columns": 1, "few": 0, "stack": 2}
STEPS = 3
MESHES = {"fsdp4": (4, 1), "tp4": (1, 4), "fsdp2.tp2": (2, 2)}
MAKE = {
    "adafactor": lambda params: Adafactor(params, lr=1e-2, weight_decay=0.1),
    "muon": lambda params: Muon([p for p in params if p.ndim > 1], lr=1e-2, weight_decay=0.1),
    "adamw8bit": lambda params: AdamW8bit(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def net(mesh=None):
    """A module of parameters alone, cut as a trainer cuts."""
    made = nn.Module()
    for name, value in values(0).items():
        cut = value if mesh is None or name not in TP else distribute_tensor(value, mesh["tp"], [Cut(TP[name])])
        made.register_parameter(name, nn.Parameter(cut))
    if mesh is not None:
        fully_shard(made, mesh=mesh["fsdp"])
    return made


def piece(param, value):
    """This rank's part of a whole gradient, laid out like ``param``."""
    if not hasattr(param, "device_mesh"):
        return value
    local = Shard(param).cut_out(value).contiguous().view(local_tensor(param).shape)
    return shard_of(param, local)


def trained(part, name):
    """The parameters and the optimizer after some steps."""
    optimizer = MAKE[name](list(part.parameters()))
    for step in range(STEPS):
        for which, grad in values(step + 1).items():
            param = part.get_parameter(which)
            param.grad = piece(param, grad)
        optimizer.step()
    return optimizer


def apart(part, optimizer, alone, single):
    """``{state: largest difference}`` from the whole values of one process."""
    found = {}
    names = {id(param): name for name, param in part.named_parameters()}
    for param, states, _ in kept(optimizer):
        shard = Shard(param)
        other = alone.get_parameter(names[id(param)])
        pairs = [("param", param, other, shard.box)]
        for state in states:
            box = state.box(shard.box, shard.shape)
            pairs.append((state.name, optimizer.state[param][state.name], single.state[other][state.name], box))
        for what, mine, want, box in pairs:
            wanted = want.detach()[within(box, whole(tuple(want.shape)))]
            held = local_tensor(mine).reshape(wanted.shape)
            if held.numel():
                found[what] = max(found.get(what, 0.0), (held.double() - wanted.double()).abs().max().item())
    return found


@pytest.fixture(scope="module")
def distances():
    """``{(mesh, optimizer): {state: largest difference on any rank}}``."""

    def work(_world):
        found = {}
        for text, sizes in MESHES.items():
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("fsdp", "tp"))
            for name in MAKE:
                alone, part = net(), net(mesh)
                found[text, name] = apart(part, trained(part, name), alone, trained(alone, name))
        return found

    ranks = everywhere(4, work)
    return {
        key: {
            state: max(found[key].get(state, 0.0) for found in ranks) for state in set().union(*(f[key] for f in ranks))
        }
        for key in ranks[0]
    }


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_on_shards_is_the_step_on_the_whole(distances, mesh, name):
    found = distances[mesh, name]
    assert "param" in found
    assert len(found) > 1
    assert max(found.values()) <= 1e-12


@pytest.mark.parametrize("mesh", MESHES)
def test_codes_and_scales_are_the_same_bytes_whatever_breaks_their_blocks(distances, mesh):
    found = distances[mesh, "adamw8bit"]
    assert {state: apart for state, apart in found.items() if "codes" in state or "scale" in state} == {
        "exp_avg_codes": 0.0,
        "exp_avg_scale": 0.0,
        "exp_avg_sq_codes": 0.0,
        "exp_avg_sq_scale": 0.0,
    }
