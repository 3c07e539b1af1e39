"""What publishing costs training: ``python benchmarks/publish.py [--model 25m] [--mib-per-second 0.5]``.

Forked ranks train for real in fsdp; an engine in processes of its own (``recipes/tiny_engine.py``) takes the weights.
Some steps are trained alone, then some beside a publish, of all weights and of changes in turn, then some alone again,
so that a machine that becomes slower or faster meanwhile is on both sides. Prints, of the slowest rank: the mean step
alone, how much longer the mean step is from the publish's begin to its end (cost, in percent), the same of the median
steps and of the processor's time that the rank's process took (work, which other load on the machine changes less), the
publish's seconds and bytes, and memory, predicted and measured. Writes ``publish.json``.

The engine runs on the same cores as the ranks, and both ends of every byte are counted in: what is sent, what is
fetched and what is digested. ``--mib-per-second`` is the rate cap of each rank; at 0.5 a publish of the 25m model from
two ranks takes some 48 s, tens of steps, in calls of the engine of some 10 s each.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # late imports of torch, which every rank would repeat
import torch.distributed as dist

from dynatrain.cluster.board import Board
from dynatrain.cluster.kernel import RANK_PRIORITY, take_realtime
from dynatrain.data.samples import Samples
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import parse_layout
from dynatrain.models.decoder import canonical_name
from dynatrain.space.presets import resolve_model
from dynatrain.train.optimizer import OptimizerSettings
from dynatrain.train.parallel import Precision
from dynatrain.train.publisher import EngineTarget
from dynatrain.train.switcher import Switcher
from dynatrain.train.trainer import Job, Trainer

WARM, STEADY = 2, 10
DEADLINE = 600.0


def train(arguments, store, rank, url):
    """One rank: ``[(what, {quantity: number})]``."""
    dist.init_process_group("gloo", store=dist.PrefixStore("default", store), rank=rank, world_size=arguments.ranks,
                            timeout=timedelta(seconds=DEADLINE))  # fmt: skip
    shape = resolve_model(arguments.model)
    settings = {"precision": Precision(), "optimizer": OptimizerSettings(lr=arguments.lr)}
    job = Job(shape=shape, seed=1, global_sequences=arguments.ranks, micro_sequences=1, **settings)
    sw = Switcher(
        job.build,
        layout=f"fsdp{arguments.ranks}",
        state={"schedule": job.scheduler},
        initial=job.initial,
        names=canonical_name,
        deadline=DEADLINE,
        board=Board(dist.PrefixStore("board", store.clone()), arguments.ranks),
        store=dist.PrefixStore("groups", store),
        legal=lambda text, _: resolve(parse_layout(text), shape.num_hidden_layers),
    )
    words = np.random.default_rng(1).integers(0, shape.vocab_size, 4000 * arguments.sequence)
    seconds = []
    data = Samples(tokens=words.astype(np.uint16), sequence=arguments.sequence)
    trainer = Trainer(job, data, sw, lambda result: seconds.append(result.seconds))
    target = EngineTarget(
        engine=url, config=shape.to_config(), mib_per_second=arguments.mib_per_second, deadline=DEADLINE
    )
    trainer.run(WARM)
    return [
        (what, beside(trainer, sw, target, seconds, changes=what == "changes"))
        for _ in range(arguments.repeats)
        for what in ("all", "changes")
    ]


def alone(trainer, seconds, steps):
    """Train some steps; seconds of each, of all with what is between them, and the processor's seconds of all."""
    seconds.clear()
    began, worked = time.perf_counter(), time.process_time()
    trainer.run(trainer.switcher.step + steps)
    return [*seconds], time.perf_counter() - began, time.process_time() - worked


def beside(trainer, sw, target, seconds, *, changes):
    """Steps alone, steps until a publish has ended, and steps alone again."""
    sw.publish(target, changes=changes).wait() if changes else None  # what changes are changes of
    before = alone(trainer, seconds, STEADY)
    dist.barrier()
    seconds.clear()
    began, worked = time.perf_counter(), time.process_time()
    publishing = sw.publish(target, changes=changes)
    while True:
        trainer.run(sw.step + 1)
        ended = torch.tensor(float(publishing.done))
        dist.all_reduce(ended)
        if ended == dist.get_world_size():
            break
    took, worked, steps = time.perf_counter() - began, time.process_time() - worked, [*seconds]
    done = publishing.wait()
    single, whole, work = (one + other for one, other in zip(before, alone(trainer, seconds, STEADY), strict=True))
    step, work = whole / len(single), work / len(single)
    return {
        "step": step,
        "cost_percent": 100 * (took / (len(steps) * step) - 1),
        "median_percent": 100 * (statistics.median(steps) / statistics.median(single) - 1),
        "work_percent": 100 * (worked / (len(steps) * work) - 1),
        "steps": len(steps),
        "publish": done.seconds,
        "mib": done.nbytes / (1 << 20),
        "predicted_mib": max(done.predicted) / (1 << 20),
        "measured_mib": max(done.measured) / (1 << 20),
    }


def measure(arguments, url):
    context = multiprocessing.get_context("fork")
    ends = [context.Pipe(duplex=False) for _ in range(arguments.ranks)]
    ports = context.SimpleQueue()

    def body(rank):
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        take_realtime(RANK_PRIORITY)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            store = dist.TCPStore("127.0.0.1", ports.get(), None, is_master=False)
            ends[rank][1].send(train(arguments, store, rank, url))
        except BaseException:
            traceback.print_exc()
        os._exit(0)

    processes = [context.Process(target=body, args=(rank,)) for rank in range(arguments.ranks)]
    for process in processes:
        process.start()
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    for _, end in ends:
        ports.put(server.port)
        end.close()
    found = [end.recv() for end, _ in ends]
    for process in processes:
        process.join()
    return found


def rows(found):
    """One row for each publish: the slowest rank's numbers."""
    for of_ranks in zip(*found, strict=True):
        what = of_ranks[0][0]
        yield {"what": what} | {name: max(numbers[name] for _, numbers in of_ranks) for name in of_ranks[0][1]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="25m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=512, help="tokens of each rank's one sequence a step")
    parser.add_argument("--mib-per-second", type=float, default=0.5, help="rate cap of each rank; 0 for none")
    parser.add_argument("--lr", type=float, default=1e-5, help="how many bf16 values a step changes depends on it")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(resolve_model(arguments.model).to_config()), encoding="utf-8")
        engine = Path(__file__).parents[1] / "recipes" / "tiny_engine.py"
        command = [sys.executable, str(engine), "--config", str(config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                made = list(rows(measure(arguments, process.stdout.readline().strip())))
            finally:
                process.terminate()
    given = {name: value for name, value in vars(arguments).items() if name != "out"}
    arguments.out.write_text(json.dumps(given | {"rows": made}, indent=1) + "\n", encoding="utf-8")
    for row in made:
        cost = (
            f"cost {row['cost_percent']:+.1f} %, median {row['median_percent']:+.1f} %, "
            f"work {row['work_percent']:+.1f} % over {row['steps']} steps"
        )
        memory = f"memory {row['measured_mib']:.1f} of {row['predicted_mib']:.1f} MiB"
        print(
            f"{row['what']:8} step {row['step']:.3f} s, {cost}, publish {row['publish']:.2f} s, "
            f"{row['mib']:.1f} MiB, {memory}"
        )


if __name__ == "__main__":
    main()
