"""Models of ``transformers`` whose layout changes while they train: Llama, Qwen3 with experts, GPT-2.

``torchrun --nproc-per-node=2 recipes/hf_models.py llama`` (or ``qwen3_moe``, ``gpt2``). Tensor parallelism is the
model's own ``tp_plan``, applied by ``transformers``, and DTensors for GPT-2, which has no plan; data parallelism is
FSDP2. The weights are tiny and random.
"""

import math
import re
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dynatrain import Switcher
from dynatrain.layout.text import print_layout
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

STEPS, BATCH, LENGTH, VOCAB = 9, 8, 10, 48
COMMON = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = COMMON | {"num_key_value_heads": 2, "head_dim": 4}
EXPERTS = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}


def make_llama():
    """From a config that says bfloat16, as those of checkpoints do.

    With a dtype that is the default: ``from_config`` makes its own the default of the whole process meanwhile, and
    later layouts are built beside training.
    """
    config = LlamaConfig(intermediate_size=24, tie_word_embeddings=True, dtype="bfloat16", **GROUPED)
    return AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype())


def make_qwen3_moe():
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS, **GROUPED))


def make_gpt2():  # drops activations: of each layout its own, as with any other change of what ranks compute
    return GPT2LMHeadModel(GPT2Config(**COMMON))


def make_gpt2_without_dropout():
    return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **COMMON))


MODELS = {
    "llama": make_llama,
    "qwen3_moe": make_qwen3_moe,
    "gpt2": make_gpt2,
    "gpt2_without_dropout": make_gpt2_without_dropout,
}
# Several tensors in one parameter, of which a tp rank has a part of each: gate and up of all experts in transformers'
# own modules; queries, keys and values (rows, heads) in GPT-2's.
QKV = {"attn.c_attn": {f"attn.{name}": (16, 4) for name in ("q", "k", "v")}}
SEGMENTS = {
    "qwen3_moe": {"mlp.experts.gate_up_proj": {"mlp.experts.gate_proj": 12, "mlp.experts.up_proj": 12}},
    "gpt2": QKV,
    "gpt2_without_dropout": QKV,
}


def tp_plan(model):
    """The model's own plan for each of its parameters and modules; a tied weight has one name."""
    plan = {}
    for name, thing in (*model.named_parameters(), *model.named_modules()):
        rule = re.sub(r"\.\d+\.", ".*.", name)
        of_module = rule.rpartition(".")[0] if isinstance(thing, torch.Tensor) else rule
        if style := model.tp_plan.get(rule) or model.tp_plan.get(of_module):
            plan[name] = style
    return plan


def dealt(value, outer, inner):
    """``outer`` parts along the last dim, each of ``inner``, as ``inner`` parts, each of ``outer``."""
    return value.unflatten(-1, (outer, inner, -1)).transpose(-3, -2).flatten(-3)


def cut(conv, mesh, *, columns, fused=1):
    """Tensor parallelism of a ``Conv1D``, whose weight is [in, out]."""
    placements = {"weight": Shard(1 if columns else 0), "bias": Shard(0) if columns else Replicate()}

    def partition(_name, module, mesh):
        for name, param in list(module.named_parameters()):
            value = dealt(param.detach(), fused, mesh.size()) if fused > 1 else param.detach()
            module.register_parameter(name, torch.nn.Parameter(distribute_tensor(value, mesh, [placements[name]])))

    def enter(_module, args, mesh):
        return tuple(DTensor.from_local(x, mesh, [Replicate() if columns else Shard(-1)]) for x in args)

    def leave(_module, out, _mesh):
        return (out if columns else out.redistribute(placements=[Replicate()])).to_local()

    distribute_module(conv, mesh, partition, enter, leave)


def apply_tp(model, mesh):
    heads = getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
    if heads % mesh.size():  # nobody else looks into a forward
        near = math.gcd(heads, mesh.size())
        raise ValueError(f"tp{mesh.size()} does not divide the {heads} key/value heads; nearest is tp{near}")
    if model.tp_plan:
        apply_tensor_parallelism(model, mesh, tp_plan(model))
        model.tie_weights()
        return
    for block in model.transformer.h:
        block.attn.split_size //= mesh.size()
        cut(block.attn.c_attn, mesh, columns=True, fused=3)
        cut(block.mlp.c_fc, mesh, columns=True)
        for conv in (block.attn.c_proj, block.mlp.c_proj):
            cut(conv, mesh, columns=False)


def make_build(make):
    def build(mesh, layout):
        model = make().double()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if layout.size("tp") > 1:
            apply_tp(model, mesh["tp"])
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


def put_together(name, value, tp, path):
    """The whole tensor, on rank 0 and in a file, which is memory that the system can take back."""
    whole = value.detach()
    if isinstance(value, DTensor):
        whole = whole.full_tensor()
    if dist.get_rank() > 0:
        return None
    if "attn.c_attn." in name:
        whole = dealt(whole, tp, 3)
    return torch.from_file(str(path), shared=True, size=whole.numel(), dtype=whole.dtype).view(whole.shape).copy_(whole)


def save(model, folder, tp):
    """What ``from_pretrained`` reads, from any layout; all ranks call it. One tensor at a time is whole in memory."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        state, wholes = {}, {}  # by identity, so that a tied weight stays one
        for name, value in model.state_dict(keep_vars=True).items():
            if id(value) not in wholes:
                wholes[id(value)] = put_together(name, value, tp, Path(scratch) / name)
            state[name] = wholes[id(value)]
        if dist.get_rank() == 0:
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
        save(sw.model, folder, sw.layout.size("tp"))
    dist.destroy_process_group()
    return seen


if __name__ == "__main__":
    main(*sys.argv[1:])
