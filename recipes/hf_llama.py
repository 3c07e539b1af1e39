"""A Llama of ``transformers``: its own tp plan, FSDP2, gradient checkpointing; saved for ``from_pretrained``.

``torchrun --nproc-per-node=2 recipes/hf_llama.py FOLDER``
"""

import re
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dynatrain import Switcher
from dynatrain.layout.text import print_layout
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

SIZES = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
CONFIG = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **SIZES)


def build(mesh, layout):
    """Or ``from_pretrained(...)`` in place of ``LlamaForCausalLM(CONFIG)`` where ``torch.empty(0)`` is not on meta."""
    model = LlamaForCausalLM(CONFIG).double()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if layout.size("tp") > 1:
        plan = {}
        for name, _ in model.named_modules():
            if style := model.tp_plan.get(re.sub(r"\.\d+\.", ".*.", name)):
                plan |= {name: style, f"{name}.weight": style}
        apply_tensor_parallelism(model, mesh["tp"], plan)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh["dp", "fsdp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def save(model, folder):
    """``hf_models.py`` does it with one whole tensor in memory at a time."""
    state = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in model.state_dict().items()}
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)


def main(folder=None, layout="fsdp2", switches=((3, "tp2"), (6, "dp2"))):
    dist.init_process_group()
    torch.manual_seed(0)
    sw = Switcher(build, layout=layout, schedule=dict(switches), data_parallel="free")
    seen = []
    for step in sw.steps(until=9):
        first = torch.randint(48, (8, 1), generator=torch.Generator().manual_seed(step))
        data = sw.world.mesh["dp", "fsdp"]
        share = data.get_local_rank("dp") * data["fsdp"].size() + data.get_local_rank("fsdp")
        tokens = ((first + torch.arange(10) * 5) % 48).chunk(data.size())[share]
        logits = sw.model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        sw.optimizer.step()
        sw.optimizer.zero_grad()
        loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        seen.append((print_layout(sw.layout), loss.item()))
    if folder:
        save(sw.model, folder)
    dist.destroy_process_group()
    return seen


if __name__ == "__main__":
    main(*sys.argv[1:])
