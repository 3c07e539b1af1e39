"""What an account gives back that is no tensor."""

from types import SimpleNamespace

import torch

from dynatrain.train.account import take
from dynatrain.train.optimizer_settings import optimizer_settings


def test_options_that_a_loop_added_to_its_groups_come_back_and_how_to_compute_stays():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0, foreach=True)
    world = SimpleNamespace(
        objects={}, object_leaves=dict, optimizer=optimizer, built_optimizer=optimizer_settings(optimizer)
    )

    take(world, {}, [{"params": ["w"], "lr": 0.5, "layer_scale": 0.25, "foreach": False}], {})

    (group,) = optimizer.param_groups
    assert (group["lr"], group["layer_scale"], group["foreach"]) == (0.5, 0.25, True)
    assert isinstance(group["params"][0], torch.Tensor)
