"""Adapters of Hugging Face's ``peft`` on a Llama, whose layout changes while they train; needs ``peft``.

``torchrun --nproc-per-node=2 recipes/hf_peft.py``. ``save_pretrained`` writes the adapters from any layout.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dynatrain import Switcher
from dynatrain.layout.text import print_layout
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, BATCH, LENGTH, VOCAB = 9, 8, 10, 48
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"], "modules_to_save": ["lm_head"]}


def make_base():
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **SMALL))


def build(mesh, _layout):
    model = get_peft_model(make_base(), LoraConfig(**LORA)).double()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in (*model.get_base_model().model.layers, model):
        fully_shard(module, mesh=mesh["dp", "fsdp"])
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)


def batch(step):
    """This rank's share of the step's tokens."""
    first = torch.randint(VOCAB, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (first + torch.arange(LENGTH) * 5) % VOCAB
    share = BATCH // dist.get_world_size()
    return tokens[dist.get_rank() * share :][:share]


def save(model, folder):
    """The adapters, as ``PeftModel.from_pretrained`` reads them; all ranks call it."""
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    state = {name: value for name, value in model.state_dict().items() if name in trained}
    state = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)


def main(layout="fsdp2", switches=((3, "dp2"), (6, "fsdp2")), folder=None):
    dist.init_process_group()
    torch.manual_seed(0)
    sw = Switcher(build, layout=layout, schedule=dict(switches))
    seen = []
    for step in sw.steps(until=STEPS):
        tokens = batch(step)
        logits = sw.model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        sw.optimizer.step()
        sw.optimizer.zero_grad()
        loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        seen.append((print_layout(sw.layout), loss.item()))
        if dist.get_rank() == 0:
            sys.stdout.write(f"step {step} {print_layout(sw.layout)} loss {loss:.15f}\n")
    if folder:
        save(sw.model, folder)
    dist.destroy_process_group()
    return seen


if __name__ == "__main__":
    main()
