import torch
import torch.distributed as dist
import torch.nn.functional as F
from dynatrain import Switcher
from dynatrain.layout.text import print_layout
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def build(mesh, layout):
    """Your model and your parallelize(model, mesh), for any layout: it is called again for each."""
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64)).double()
    if layout.size("tp") > 1:
        parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp", "fsdp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def main(layout="fsdp2", switches=((10, "tp2"), (20, "dp2"))):
    dist.init_process_group()
    torch.manual_seed(0)
    sw = Switcher(build, layout=layout, schedule=dict(switches), data_parallel="free")
    seen = []
    for step in sw.steps(until=30):
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(step))
        data = sw.world.mesh["dp", "fsdp"]
        mine = tokens.chunk(data.size())[data.get_local_rank("dp") * data["fsdp"].size() + data.get_local_rank("fsdp")]
        loss = F.cross_entropy(sw.model(mine), (5 * mine + 1) % 64)
        loss.backward()
        sw.optimizer.step()
        sw.optimizer.zero_grad()
        loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        seen.append((print_layout(sw.layout), loss.item()))
    dist.destroy_process_group()
    return seen


if __name__ == "__main__":
    main()
