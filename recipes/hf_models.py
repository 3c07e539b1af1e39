"""Models of ``transformers`` whose layout changes while they train: Llama, Qwen3 with experts, GPT-2.

``torchrun --nproc-per-node=2 recipes/hf_models.py llama`` (or ``qwen3_moe``, ``gpt2``). Tensor parallelism is the
model's own ``tp_plan``, applied by ``transformers``; data parallelism is FSDP2. The weights are tiny and random.
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
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

STEPS, BATCH, LENGTH, VOCAB = 9, 8, 10, 48
COMMON = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = COMMON | {"num_key_value_heads": 2, "head_dim": 4}
EXPERTS = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}


def make_llama():
    return LlamaForCausalLM(LlamaConfig(intermediate_size=24, tie_word_embeddings=True, **GROUPED))


def make_qwen3_moe():
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS, **GROUPED))


def make_gpt2():  # drops activations; has no tp_plan
    return GPT2LMHeadModel(GPT2Config(**COMMON))


MODELS = {"llama": make_llama, "qwen3_moe": make_qwen3_moe, "gpt2": make_gpt2}
# transformers packs gate and up of all experts in one parameter, of which a tp rank has a part of each.
SEGMENTS = {"qwen3_moe": {"mlp.experts.gate_up_proj": {"mlp.experts.gate_proj": 12, "mlp.experts.up_proj": 12}}}


def tp_plan(model):
    """The model's own plan for each of its parameters and modules; a tied weight has one name."""
    plan = {}
    for name, thing in (*model.named_parameters(), *model.named_modules()):
        rule = re.sub(r"\.\d+\.", ".*.", name)
        of_module = rule.rpartition(".")[0] if isinstance(thing, torch.Tensor) else rule
        if style := model.tp_plan.get(rule) or model.tp_plan.get(of_module):
            plan[name] = style
    return plan


def make_build(make):
    def build(mesh, layout):
        model = make().double()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if layout.size("tp") > 1:
            apply_tensor_parallelism(model, mesh["tp"], tp_plan(model))
            model.tie_weights()
        blocks = getattr(model.base_model, "layers", None) or model.base_model.h
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh["dp", "fsdp"])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    return build


def batch(step, mesh):
    """This data rank's share of the step's tokens: the global batch is the same in every layout."""
    first = torch.randint(VOCAB, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (first + torch.arange(LENGTH) * 5) % VOCAB
    data = mesh["dp", "fsdp"]
    number, share = data.get_local_rank("dp") * data["fsdp"].size() + data.get_local_rank("fsdp"), BATCH // data.size()
    return tokens[number * share :][:share]


def save(model, folder):
    """What ``from_pretrained`` reads, from any layout; all ranks call it."""
    whole = {}  # by identity, so that a tied weight stays one
    for value in model.state_dict(keep_vars=True).values():
        whole[id(value)] = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
    if dist.get_rank() == 0:
        state = {name: whole[id(value)] for name, value in model.state_dict(keep_vars=True).items()}
        model.save_pretrained(folder, state_dict=state)


def main(name="llama", layout="fsdp2", switches=((3, "tp2"), (6, "fsdp2")), folder=None):
    dist.init_process_group()
    torch.manual_seed(0)
    build = make_build(MODELS[name])
    sw = Switcher(build, layout=layout, schedule=dict(switches), segments=SEGMENTS.get(name), data_parallel="free")
    seen = []
    for step in sw.steps(until=STEPS):
        tokens = batch(step, sw.world.mesh)
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
    main(*sys.argv[1:])
