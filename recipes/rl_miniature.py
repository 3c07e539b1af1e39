"""Reinforcement learning in miniature: a tiny Llama learns to add digits, from samples that an engine draws.

``python recipes/rl_miniature.py``. Four ranks train in ``fsdp2.tp2``. For each round two of them are lent: their
processes end, and the engine's two wake up in their places; the other two publish the weights from ``fsdp2``, and make
the next updates while ranks come back. The answers can be checked, so nothing judges but ``==``.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist
from dynatrain import EngineTarget, RunAgent
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from hf_models import apply_tensor_parallelism, tp_plan

PROMPTS = [list(f"{a}+{b}=".encode()) for a in range(4) for b in range(3)]
SAMPLES, UPDATES, RATE = 32, 12, 5e-3
CONFIG = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=64,  # bytes: the digits, + and =
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.2,
    tie_word_embeddings=True,
)
RUN = f"""
loop = "{Path(__file__).absolute()}:learn"
layout = "fsdp2.tp2"
steps = STEPS
device = "cpu"
[model]
config = "config.json"
[save]
at_end = false
"""


def build(mesh, layout):
    model = LlamaForCausalLM(CONFIG).float()
    if layout.size("tp") > 1:
        apply_tensor_parallelism(model, mesh["tp"], tp_plan(model))
        model.tie_weights()
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh["dp", "fsdp"])
    return model, torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)


def start_engine(config):
    """An engine of two ranks, which fuses and cuts the weights in its own way; asleep until ranks are lent to it."""
    command = [sys.executable, str(Path(__file__).with_name("tiny_engine.py")), "--config", str(config)]
    engine = subprocess.Popen([*command, "--tp", "2", "--dtype", "float32"], stdout=subprocess.PIPE, text=True)
    os.environ["ENGINE"] = engine.stdout.readline().strip()
    ask("sleep")
    return engine


def ask(verb, **body):
    request = urllib.request.Request(f"{os.environ['ENGINE']}/{verb}", json.dumps(body).encode())  # noqa: S310
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        return json.loads(answer.read())


class Samples:
    """What updates learn from, as lists: a part of the job, so that ranks that come have it."""

    def __init__(self):
        answers = torch.randint(ord("0"), ord("9") + 1, (len(PROMPTS) * SAMPLES,), generator=torch.Generator())
        self.tokens = [[*prompt, answer] for prompt, answer in zip(PROMPTS * SAMPLES, answers.tolist(), strict=True)]
        self.drawn = self.advantage = [0.0] * len(self.tokens)

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def rollout(samples, rank, seed):
    """Fresh samples, equal on all ranks, and the share of right answers; rank 0 asks the engine."""
    told = [None]
    if rank == 0:
        prompts = [prompt for prompt in PROMPTS for _ in range(SAMPLES)]
        told = [ask("generate", prompts=prompts, max_tokens=1, seed=seed)]
        ask("sleep")
    dist.broadcast_object_list(told)
    samples.tokens = told[0]["tokens"]
    samples.drawn = [row[0] for row in told[0]["log_probabilities"]]
    right = torch.tensor([float(a + b - 2 * ord("0") == c - ord("0")) for a, _, b, _, c in samples.tokens])
    groups = right.view(len(PROMPTS), SAMPLES)  # of one prompt: how much better than the others each one is (GRPO)
    better = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 0.1)
    samples.advantage = better.flatten().tolist()
    return right.mean().item()


def scores(model, tokens):
    """The policy's own log-probability of each row's last token."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return logits[:, -1].log_softmax(-1).gather(1, tokens[:, -1:]).squeeze(1)


def loss_of(model, samples, mesh, warm):
    """Of this data rank's part of the samples; to begin with, that random digits are what answers look like."""
    data = mesh["dp", "fsdp"]
    part = data.get_local_rank("dp") * data["fsdp"].size() + data.get_local_rank("fsdp")
    rows = (samples.tokens, samples.drawn, samples.advantage)
    tokens, drawn, advantage = (torch.tensor(row).chunk(data.size())[part] for row in rows)
    if warm:
        return -scores(model, tokens).mean()
    ratio = (scores(model, tokens) - drawn).exp()
    return -torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()


def learn(run):
    torch.manual_seed(0)
    target = EngineTarget(engine=os.environ["ENGINE"], config=CONFIG.to_dict(), layout="tp2", dtype="fp32")
    samples, lent = Samples(), None
    sw = run.switcher(build, state={"samples": samples}, data_parallel="free")
    for step in sw.steps(until=run.steps):
        if step and step % UPDATES == 0:
            lent.wait()  # the processes of two ranks are gone, and so is what they held
            if sw.rank == 0:
                ask("wake_up")
            sw.publish(target).wait()
            accuracy = rollout(samples, sw.rank, seed=step)
            with torch.no_grad():
                own = scores(sw.model, torch.tensor(samples.tokens))
            run.note(accuracy=accuracy, apart=(own - torch.tensor(samples.drawn)).abs().max().item())
            if step + 3 < run.steps:
                sw.reclaim(at=step + 3)  # ranks start in these places beside the next three updates
        if step + 3 < run.steps and (step + 3) % UPDATES == 0:
            lent = sw.lend(count=2, layout="fsdp2", at=step + 3)
        loss_of(sw.model, samples, sw.world.mesh, warm=step < UPDATES).backward()
        sw.optimizer.step()
        sw.optimizer.zero_grad()


def main(folder, rounds=6):
    config = Path(folder) / "config.json"
    config.write_text(json.dumps(CONFIG.to_dict()))
    settings = Path(folder) / "run.toml"
    settings.write_text(RUN.replace("STEPS", str(UPDATES * rounds + 1)).replace("config.json", str(config)))
    engine = start_engine(config)
    try:
        run = RunAgent(settings, run=Path(folder) / "run")
        run.start()
        code = run.wait(600)
        lines = map(json.loads, run.folder.metrics.read_text().splitlines())
        return code, [(line["accuracy"], line["apart"], line["layout"]) for line in lines], run.folder
    finally:
        engine.terminate()
        engine.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        _, seen, _ = main(scratch)
    for accuracy, apart, layout in seen:
        sys.stdout.write(f"published from {layout}: {accuracy:.0%} right, log-probabilities apart {apart:.1e}\n")
