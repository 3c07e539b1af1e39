"""Optimizer state on a CUDA device: step counters lie where torch's kernels want them, and are saved and loaded."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from dynatrain.cluster.board import Board
from dynatrain.train.saving import Saves
from dynatrain.train.switcher import Switcher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.fixture
def alone():
    """A default group of this process alone, and a store."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=dist.PrefixStore("default", store), rank=0, world_size=1)
    yield store
    dist.destroy_process_group()


def switcher(store, name, device, options, root):
    def build(mesh, _layout):
        model = nn.Linear(5, 3)
        if not model.weight.is_meta:
            torch.manual_seed(0)
            model = nn.Linear(5, 3).to(device)
        fully_shard(model, mesh=mesh["dp", "fsdp"])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **options)

    board, groups = (dist.PrefixStore(f"{name}/{what}", store) for what in ("board", "groups"))
    given = {"board": Board(board, 1), "store": groups, "device": device, "saves": Saves(root=root)}
    return Switcher(build, layout="dp1", **given)


def saved_and_loaded(store, device, options, root):
    first = switcher(store, "first", device, options, root)
    for _ in first.steps(until=3):
        first.model(torch.ones(2, 5, device=device)).sum().backward()
        first.optimizer.step()
        first.optimizer.zero_grad()
    assert first.save_now().startswith("saved in ")
    first.close()
    second = switcher(store, "second", device, options, root)
    assert second.load(root / "step_00000003") == 3
    second.close()
    return [
        (a["step"].device.type, a["step"].item(), b["step"].device.type, b["step"].item())
        for a, b in zip(first.optimizer.state.values(), second.optimizer.state.values(), strict=True)
    ]


@pytest.mark.parametrize(
    ("options", "where"), [({}, "cpu"), ({"fused": True}, "cuda"), ({"capturable": True, "foreach": True}, "cuda")]
)
def test_step_counters_lie_where_the_group_counts_and_come_back(alone, tmp_path, options, where):
    assert saved_and_loaded(alone, torch.device("cuda"), options, tmp_path) == [(where, 3.0, where, 3.0)] * 2
