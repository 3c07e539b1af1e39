"""Plain PyTorch goes on from a checkpoint of dynatrain, which is blocked here: run by test_saved under torchrun."""

# ruff: noqa: E402 - the block stands before everything else
import os
import sys
from pathlib import Path

sys.modules["dynatrain"] = None

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

checkpoint, first, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)  # the checkpoint has the rate
parameters, moments = get_state_dict(model, optimizer)
state = {"model": parameters, "optim": moments}
dcp.load(state, checkpoint_id=checkpoint)
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
losses = []
for step in range(first, first + 2):
    x = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(8, 5) + step / 10
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(repr(loss.item()))
if dist.get_rank() == 0:
    out.write_text("\n".join(losses))
dist.destroy_process_group()
os._exit(0)  # threads of torch that are still there may abort the interpreter as it ends
