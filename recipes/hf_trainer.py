"""Hugging Face's ``Trainer``, unchanged, over a model whose layout changes while it trains; needs ``accelerate``.

``torchrun --nproc-per-node=2 recipes/hf_trainer.py``. The trainer holds a stand-in that passes everything on to the
model of the moment; a callback takes switches at its step edges. It deals batches out over all ranks, so layouts are of
dp and fsdp; a step that a failed switch takes back is a batch without an update, as a trainer comes back to none.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from dynatrain import Switcher
from dynatrain.layout.text import print_layout
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

VOCAB, STEPS = 48, 9
CONFIG = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


class StandIn(nn.Module):
    """What the trainer holds for the model."""

    is_distributed_loading_by_transformers = True  # it is sharded: to be wrapped and moved by nobody

    def __init__(self, sw):
        super().__init__()
        object.__setattr__(self, "sw", sw)

    def __getattr__(self, name):
        return getattr(self.sw.model, name)

    def forward(self, input_ids, labels):
        return self.sw.model(input_ids=input_ids, labels=labels, use_cache=False)

    def named_parameters(self, *args, **options):
        return self.sw.model.named_parameters(*args, **options)

    def named_modules(self, *args, **options):
        return self.sw.model.named_modules(*args, **options)

    def named_children(self):
        return self.sw.model.named_children()

    def state_dict(self, *args, **options):
        return self.sw.model.state_dict(*args, **options)

    def train(self, mode=True):
        return self.sw.model.train(mode)


class Switching(TrainerCallback):
    """Takes switches between the trainer's steps, and gives it the optimizer and the schedule of the new layout."""

    def __init__(self, sw):
        self.sw, self.trainer, self.steps, self.seen = sw, None, None, []

    def on_step_begin(self, args, state, control, **_):
        self.steps = self.steps or self.sw.steps(until=state.max_steps)
        next(self.steps)
        self.trainer.optimizer.optimizer = self.sw.optimizer  # inside accelerate's wrapper
        self.trainer.lr_scheduler = self.sw.state["lr"]

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self.seen.append((print_layout(self.sw.layout), logs["loss"]))
            sys.stdout.write(f"step {state.global_step} {self.seen[-1]}\n")


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
        switching = Switching(sw)
        model, optimizers = StandIn(sw), (sw.optimizer, sw.state["lr"])
        trainer = Trainer(model, args, train_dataset=samples(), optimizers=optimizers, callbacks=[switching])
        switching.trainer = trainer
        trainer.train()
    norm = sum(param.detach().full_tensor().square().sum().item() for param in sw.model.parameters())
    dist.destroy_process_group()
    return [*switching.seen, ("end", norm)]


if __name__ == "__main__":
    main()
