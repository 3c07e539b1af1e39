"""Is a step with dynatrain as fast as without? ``python benchmarks/steady.py [--model 25m]``.

Two jobs of the same model on forked ranks beside each other, one step of one at a time, the other waiting: one is a
loop in plain PyTorch (FSDP2, AdamW, clipping, a schedule), as a tutorial would write it; the other is dynatrain's
trainer in the same layout. Both take their steps in turn, which of them first changing from step to step; then the
second one goes away and comes back five times (ten switches), and both take as many steps again. Prints the medians of
the slowest rank's seconds and their ratio (plain over dynatrain: above 1, dynatrain is faster), before the switches and
after them, and writes ``steady.json``.
"""

import argparse
import json
import statistics
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from round_trips import DEADLINE, WARM, Crew, Rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from dynatrain.models.decoder import DecoderPart
from dynatrain.models.keyed import KeyedStream
from dynatrain.space.presets import resolve_model


class Plain:
    """One rank of the plain loop."""

    def __init__(self, arguments, store, rank):
        timeout = timedelta(seconds=DEADLINE)
        default = dist.PrefixStore("default", store)
        dist.init_process_group("gloo", store=default, rank=rank, world_size=arguments.ranks, timeout=timeout)
        shape = resolve_model(arguments.model)
        torch.manual_seed(1)
        self.model = DecoderPart(
            shape, range(shape.num_hidden_layers), first=True, last=True, streams=KeyedStream(seed=1)
        )
        mesh = init_device_mesh("cpu", (arguments.ranks,))
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
        self.schedule = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 10))
        self.words = np.random.default_rng(rank).integers(0, shape.vocab_size, (1000, arguments.sequence + 1))
        self.number = 0

    def step(self):
        """One step; its seconds."""
        began = time.perf_counter()
        tokens = torch.from_numpy(self.words[self.number % len(self.words)])[None]
        logits = self.model(tokens[:, :-1], torch.tensor([self.number]))
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[0, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        loss.item()
        self.number += 1
        return time.perf_counter() - began


def measure(arguments):
    """``{"before" or "after": {job: seconds of its steps}}``."""
    torch.set_num_threads(1)
    crews = {"plain": Crew(arguments, Plain), "dynatrain": Crew(arguments, Rank)}
    try:
        for crew in crews.values():
            crew.serve()
        for crew in crews.values():
            for _ in range(WARM):
                crew.do("step")
        before = in_turn(crews, arguments.steps)
        for _ in range(5):
            for layout in (arguments.to, arguments.start):
                crews["dynatrain"].do("switch", layout, arguments.mode)
        return {"before": before, "after": in_turn(crews, arguments.steps)}
    finally:
        for crew in crews.values():
            crew.close()


def in_turn(crews, steps):
    """Seconds of the steps of each."""
    seconds = {name: [] for name in crews}
    for number in range(steps):
        for name in list(crews)[:: 1 if number % 2 else -1]:
            seconds[name].append(max(crews[name].do("step")))
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="25m")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--to", default="fsdp2.tp2", help="where the ten switches lead, and back")
    parser.add_argument("--mode", default="keep", choices=("keep", "tight"))
    parser.add_argument("--sequence", type=int, default=128, help="tokens of each rank's one sequence a step")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    arguments.start = f"fsdp{arguments.ranks}"
    found = measure(arguments)
    medians = {when: {name: statistics.median(of) for name, of in jobs.items()} for when, jobs in found.items()}
    Path("steady.json").write_text(json.dumps({"seconds": found, "medians": medians}, indent=1) + "\n")
    for when, jobs in medians.items():
        ratio = jobs["plain"] / jobs["dynatrain"]
        print(f"{when:7} plain {jobs['plain']:.3f} s  dynatrain {jobs['dynatrain']:.3f} s  ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
