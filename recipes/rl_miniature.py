"""Reinforcement learning in miniature: a tiny Llama learns to add digits, from samples that an engine draws.

``torchrun --nproc-per-node=2 recipes/rl_miniature.py``. Each round begins in the layout ``tp2``: the ranks publish the
weights to an engine in processes of its own, park, and leave the device to it while it samples; then they come back
and make three updates in ``tp2``, as many in ``fsdp2``. The answers can be checked, so nothing judges but ``==``.
"""

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist
from dynatrain import EngineTarget, Switcher
from dynatrain.layout.text import print_layout
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from hf_models import apply_tensor_parallelism, tp_plan

PROMPTS, SAMPLES, UPDATES, RATE = 25, 16, 6, 1e-2
CONFIG = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=64,  # bytes: the digits, + and =
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
)


def build(mesh, layout):
    model = LlamaForCausalLM(CONFIG).float()
    if layout.size("tp") > 1:
        apply_tensor_parallelism(model, mesh["tp"], tp_plan(model))
        model.tie_weights()
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh["dp", "fsdp"])
    return model, torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)


def start_engine(folder):
    """An engine of two ranks, which fuses and cuts the weights in its own way."""
    config = Path(folder) / "config.json"
    config.write_text(json.dumps(CONFIG.to_dict()))
    command = [sys.executable, str(Path(__file__).with_name("tiny_engine.py")), "--config", str(config)]
    engine = subprocess.Popen([*command, "--tp", "2", "--dtype", "float32"], stdout=subprocess.PIPE, text=True)
    return engine, engine.stdout.readline().strip()


def ask(url, verb, **body):
    request = urllib.request.Request(f"{url}/{verb}", json.dumps(body).encode())  # noqa: S310
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        return json.loads(answer.read())


def rollout(url, seed):
    """``(tokens [B, T], log-probability [B] of the last one, reward [B])``; rank 0 asks, all get it."""
    told = [None]
    if dist.get_rank() == 0:
        prompts = [list(f"{a}+{b}=".encode()) for a in range(5) for b in range(5) for _ in range(SAMPLES)]
        told = [ask(url, "generate", prompts=prompts, max_tokens=1, seed=seed)]
    dist.broadcast_object_list(told)
    tokens = torch.tensor(told[0]["tokens"])
    right = (tokens[:, 0] + tokens[:, 2] - 2 * ord("0") + ord("0") == tokens[:, 4]).float()
    digit = ((tokens[:, 4] >= ord("0")) & (tokens[:, 4] <= ord("9"))).float()
    return tokens, torch.tensor(told[0]["log_probabilities"])[:, 0], 0.9 * right + 0.1 * digit


def scores(model, tokens):
    """The policy's own log-probability of each row's last token."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return logits[:, -1].log_softmax(-1).gather(1, tokens[:, -1:]).squeeze(1)


def share(rows, mesh):
    """This data rank's part of the rows."""
    data = mesh["dp", "fsdp"]
    return rows.chunk(data.size())[data.get_local_rank("dp") * data["fsdp"].size() + data.get_local_rank("fsdp")]


def advantages(reward):
    """How much better than the other samples of its prompt each one is (GRPO)."""
    groups = reward.view(PROMPTS, SAMPLES)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 0.1)).flatten()


def main(rounds=12):
    dist.init_process_group()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        engine, url = start_engine(folder) if dist.get_rank() == 0 else (None, None)
        try:
            return learn(rounds, url)
        finally:
            if engine:
                engine.terminate()
            dist.destroy_process_group()


def learn(rounds, url):
    told = [url]
    dist.broadcast_object_list(told)
    target = EngineTarget(engine=told[0], config=CONFIG.to_dict(), layout="tp2", dtype="fp32")
    sw, seen = Switcher(build, layout="tp2", data_parallel="free"), []
    for step in sw.steps(until=UPDATES * rounds):
        if step % UPDATES == 0:
            sw.publish(target).wait()
            sw.park()
            tokens, drawn, reward = rollout(told[0], seed=step)
            sw.unpark()
            with torch.no_grad():
                apart = (scores(sw.model, tokens) - drawn).abs().max().item()
            advantage = advantages(reward)
            seen.append([reward.mean().item(), apart])
        if step % (UPDATES // 2) == 0:
            seen[-1].append(print_layout(sw.layout))
            if (then := step + UPDATES // 2) < UPDATES * rounds:
                sw.request("fsdp2" if step % UPDATES == 0 else "tp2", at=then)
        mine, old, weight = (share(rows, sw.world.mesh) for rows in (tokens, drawn, advantage))
        ratio = (scores(sw.model, mine) - old).exp()
        (-torch.minimum(weight * ratio, weight * ratio.clamp(0.8, 1.2)).mean()).backward()
        sw.optimizer.step()
        sw.optimizer.zero_grad()
    return seen


if __name__ == "__main__":
    for reward, apart, *layouts in main():
        sys.stdout.write(f"reward {reward:.3f}  log-probabilities apart {apart:.1e}  {' '.join(layouts)}\n")
