"""Hugging Face's ``Trainer``, unchanged, over a model whose layout changes while it trains; needs ``accelerate``.

``torchrun --nproc-per-node=2 recipes/hf_trainer.py``. The trainer holds stand-ins that pass everything on to what the
layout of the moment has. It deals batches out over all ranks, so layouts are of dp and fsdp.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from dynatrain import Switcher, stand_ins
from dynatrain.layout.text import print_layout
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

VOCAB, STEPS = 48, 9
CONFIG = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


class Seen(TrainerCallback):
    """Keeps each step's layout and loss."""

    def __init__(self, sw):
        self.sw, self.steps = sw, []

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self.steps.append((print_layout(self.sw.layout), logs["loss"]))
            if state.is_world_process_zero:
                sys.stdout.write(f"step {state.global_step} {self.steps[-1]}\n")


def build(mesh, _layout):
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **CONFIG)).double()
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh["dp", "fsdp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_lr(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))


def samples():
    starts = torch.randint(VOCAB, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens = [(start + torch.arange(10) * 5) % VOCAB for start in starts]
    return [{"input_ids": one, "labels": one} for one in tokens]


def main(layout="fsdp2", switches=((3, "dp2"), (6, "fsdp2"))):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sw = Switcher(build, layout=layout, schedule=dict(switches), state={"lr": make_lr})
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=8 // dist.get_world_size(),
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            ddp_backend="gloo",
        )
        model, *optimizers = stand_ins(sw, "lr")
        seen = Seen(sw)
        trainer = Trainer(model, args, train_dataset=samples(), optimizers=tuple(optimizers), callbacks=[seen])
        trainer.train()
    norm = sum(param.detach().full_tensor().square().sum().item() for param in sw.model.parameters())
    dist.destroy_process_group()
    return [*seen.steps, ("end", norm)]


if __name__ == "__main__":
    main()
