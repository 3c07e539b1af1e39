"""What ``goodput.py`` compares with: a training loop in plain PyTorch that is started again at every change.

``torchrun --nproc-per-node=N benchmarks/restarted.py --folder F --model tiny --until S --between 250``: the same
decoder under FSDP2, AdamW, and checkpoints by ``torch.distributed.checkpoint`` on local disk, one each Young-Daly
interval (the square root of twice the seconds of a save times the seconds between two faults, of which ``--between`` is
the steps). SIGTERM to the launcher saves at the end of the step under way. Rank 0 appends ``{"step", "time", "seconds",
"ranks"}`` for each step to ``F/steps.jsonl``.
"""

import argparse
import json
import math
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from dynatrain.data.order import batch_ids
from dynatrain.models.decoder import DecoderPart
from dynatrain.models.keyed import KeyedStream
from dynatrain.space.presets import resolve_model

FIRST_SAVE = 5


def main() -> None:
    """Train from the newest checkpoint to the last step, or to SIGTERM."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--model", required=True)
    options.add_argument("--until", type=int, required=True)
    options.add_argument("--between", type=float, required=True, help="steps between two faults")
    options.add_argument("--sequences", type=int, default=12)
    options.add_argument("--length", type=int, default=64)
    asked = options.parse_args()
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shape = resolve_model(asked.model)
    model = DecoderPart(shape, range(shape.num_hidden_layers), first=True, last=True, streams=KeyedStream(seed=0))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(asked, shape.vocab_size, model, optimizer, stopped)
    dist.destroy_process_group()


def train(asked, vocabulary, model, optimizer, stopped) -> None:
    """Steps, and saves in between."""
    began = load(asked.folder, model, optimizer)
    kept = asked.folder / "interval"
    measured = kept.exists()
    every = int(kept.read_text()) if measured else FIRST_SAVE
    with (asked.folder / "steps.jsonl").open("a", encoding="utf-8") as lines:
        for step in range(began, asked.until):
            since = time.monotonic()
            one_step(asked, step, vocabulary, model, optimizer)
            if dist.get_rank() == 0:
                told = {"step": step, "time": time.time(), "seconds": time.monotonic() - since}
                lines.write(json.dumps(told | {"ranks": dist.get_world_size()}) + "\n")
                lines.flush()
            told_to_stop = torch.tensor([float(bool(stopped)), time.monotonic() - since])
            dist.all_reduce(told_to_stop, op=dist.ReduceOp.MAX)
            if told_to_stop[0] or (step + 1) % every == 0:
                seconds = save(asked.folder, step + 1, model, optimizer)
                if not measured:
                    measured, between = True, asked.between * told_to_stop[1].item()
                    every = max(1, round(math.sqrt(2 * seconds * between) / told_to_stop[1].item()))
                    if dist.get_rank() == 0:
                        kept.write_text(str(every))
            if told_to_stop[0]:
                return


def one_step(asked, step, vocabulary, model, optimizer) -> None:
    """This rank's share of the step's sequences; micro-batches of one sequence, as the other run has them."""
    ids = batch_ids(0, step, asked.sequences, 10_000)[dist.get_rank() :: dist.get_world_size()]
    for number, sample in enumerate(ids):
        tokens = torch.randint(vocabulary, (1, asked.length + 1), generator=torch.Generator().manual_seed(int(sample)))
        model.set_is_last_backward(number == len(ids) - 1)
        logits = model(tokens[:, :-1], torch.tensor([int(sample)]))
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[0, 1:])
        (loss * dist.get_world_size() / asked.sequences).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def save(folder, step, model, optimizer) -> float:
    """Write a checkpoint; its seconds on the slowest rank."""
    since = time.monotonic()
    weights, moments = get_state_dict(model, optimizer)
    path = folder / f"step_{step:08d}"
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)
    seconds = torch.tensor(time.monotonic() - since)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def load(folder, model, optimizer) -> int:
    """The newest whole checkpoint, resharded by DCP as it is loaded; its step."""
    whole = sorted(path.parent for path in folder.glob("step_*/.metadata"))
    if not whole:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=whole[-1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(whole[-1].name.removeprefix("step_"))


if __name__ == "__main__":
    main()
