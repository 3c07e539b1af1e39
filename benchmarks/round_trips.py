"""Does a job that went away and came back run as a fresh one? ``python benchmarks/round_trips.py [--model 25m]``.

Two jobs of the same model run on forked ranks beside each other, one step of one at a time, the other waiting: one goes
from A to B and back five times, the other stays fresh in A. Then both take their steps in A in turn, which of them
first changing from step to step. Prints a table and writes ``round_trips.json``.

What is compared:

- step: seconds of a step on its slowest rank; the ratio is that of the medians.
- memory: resident bytes of all ranks by the kernel's count in which a page that n processes share counts 1/n (PSS).
- descriptors, threads and process groups of a rank after each round trip: from the second on, the numbers stay.
"""

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # late imports of torch, which every rank would repeat
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dynatrain.cluster.board import Board
from dynatrain.cluster.kernel import AGENT_PRIORITY, RANK_PRIORITY, leave_realtime, take_realtime
from dynatrain.data.samples import Samples
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import parse_layout
from dynatrain.models.decoder import canonical_name
from dynatrain.space.presets import resolve_model
from dynatrain.train.optimizer import OptimizerSettings
from dynatrain.train.parallel import Precision
from dynatrain.train.switcher import Switcher
from dynatrain.train.trainer import Job, Trainer

JOBS = ("fresh", "switched")
WARM = 3
"""Steps before anything is measured, and between two switches."""
DEADLINE = 300.0


class Rank:
    """One rank of one of the two jobs; does what it is told, one word at a time."""

    def __init__(self, arguments, store, rank):
        timeout = timedelta(seconds=DEADLINE)
        default = dist.PrefixStore("default", store)
        dist.init_process_group("gloo", store=default, rank=rank, world_size=arguments.ranks, timeout=timeout)
        shape = resolve_model(arguments.model)
        job = Job(
            shape=shape,
            seed=1,
            precision=Precision(),
            optimizer=OptimizerSettings(),
            global_sequences=arguments.ranks,
            micro_sequences=1,
        )
        self.arrived = []
        self.seconds = []
        self.sw = Switcher(
            job.build,
            layout=arguments.start,
            state={"schedule": job.scheduler},
            initial=job.initial,
            names=canonical_name,
            deadline=DEADLINE,
            board=Board(dist.PrefixStore("board", store.clone()), arguments.ranks),
            store=dist.PrefixStore("groups", store),
            recorder=self,
            legal=lambda text, _: resolve(parse_layout(text), shape.num_hidden_layers),
        )
        words = np.random.default_rng(1).integers(0, shape.vocab_size, 1000 * arguments.sequence)
        data = Samples(tokens=words.astype(np.uint16), sequence=arguments.sequence)
        self.trainer = Trainer(job, data, self.sw, lambda result: self.seconds.append(result.seconds))

    # The recorder's face.

    def announced(self, order, step):
        pass

    def step_ended(self, now):
        pass

    def ended(self, attempt, outcome, reason, step, told):  # noqa: ARG002
        assert outcome == "committed", reason
        self.arrived.append(attempt.order.layout)

    # What it is told.

    def step(self):
        """One step; its seconds."""
        self.trainer.run(self.sw.step + 1)
        return self.seconds[-1]

    def switch(self, layout, mode):
        """Go to ``layout`` and settle there."""
        before = len(self.arrived)
        self.sw.request(layout, mode=mode)
        while len(self.arrived) == before:
            self.step()
        for _ in range(WARM):
            self.step()

    def count(self):
        """What this process holds now; a collection before it parts the pages shared since the fork, in both jobs."""
        gc.collect()
        rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
        held = {what: len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task")}
        return {
            "memory": next(1024 * int(line.split()[1]) for line in rollup if line.startswith("Pss:")),
            "descriptors": held["fd"],
            "threads": held["task"],
            "groups": len(c10d._world.pg_map),
        }


def life(make, arguments, rank, ports, end):
    """A forked rank, as ``make`` makes it: obeys ``(method, arguments)`` until there is no more."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    take_realtime(RANK_PRIORITY)
    try:
        store = dist.TCPStore("127.0.0.1", ports.get(), None, is_master=False, timeout=timedelta(seconds=DEADLINE))
        me = make(arguments, store, rank)
        while (told := end.recv()) is not None:
            end.send(getattr(me, told[0])(*told[1:]))
    except BaseException:
        end.send(RuntimeError(f"rank {rank}: {traceback.format_exc()}"))
    os._exit(0)


class Crew:
    """The ranks of one job, seen from outside."""

    def __init__(self, arguments, make=Rank):
        context = multiprocessing.get_context("fork")
        ports, ends = context.SimpleQueue(), [context.Pipe() for _ in range(arguments.ranks)]
        self.ends = [mine for mine, _ in ends]
        self.workers = [
            context.Process(target=life, args=(make, arguments, rank, ports, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for worker in self.workers:
            worker.start()
        for _, theirs in ends:
            theirs.close()  # a rank that is gone is an end of file here
        self._ports = ports

    def serve(self):
        """Let the ranks meet; starts a thread, so all crews are forked before."""
        realtime = take_realtime(AGENT_PRIORITY)
        self.server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        if realtime:
            leave_realtime()
        for _ in self.workers:
            self._ports.put(self.server.port)

    def do(self, *told):
        """Have all ranks do it; what each answered."""
        for end in self.ends:
            end.send(told)
        answers = [end.recv() for end in self.ends]
        if failed := [one for one in answers if isinstance(one, Exception)]:
            raise failed[0]
        return answers

    def close(self):
        for worker in self.workers:
            worker.kill()
            worker.join()


def measure(arguments, tell=print):
    """``(counts after each round trip, {job: seconds of its steps}, {job: counts at the end})``, counts by rank."""
    torch.set_num_threads(1)
    crews = {name: Crew(arguments) for name in JOBS}
    try:
        for crew in crews.values():
            crew.serve()
        for crew in crews.values():
            for _ in range(WARM):
                crew.do("step")
        trips = []
        for number in range(1, arguments.trips + 1):
            for layout in (arguments.to, arguments.start):
                crews["switched"].do("switch", layout, arguments.mode)
            trips.append(crews["switched"].do("count"))
            tell(f"round trip {number}: {summed(trips[-1])}")
        seconds = {name: [] for name in JOBS}
        for number in range(arguments.steps):
            began = time.perf_counter()
            for name in JOBS if number % 2 else reversed(JOBS):
                seconds[name].append(max(crews[name].do("step")))
            tell(f"step {number + 1} of both: {time.perf_counter() - began:.2f} s")
        return trips, seconds, {name: crew.do("count") for name, crew in crews.items()}
    finally:
        for crew in crews.values():
            crew.close()


def summed(ranks):
    return {what: sum(one[what] for one in ranks) for what in ranks[0]}


def record(arguments, found):
    """The numbers as they are written."""
    trips, seconds, ends = found
    medians = {name: statistics.median(of) for name, of in seconds.items()}
    memory = {name: summed(of)["memory"] for name, of in ends.items()}
    return {
        "model": arguments.model,
        "ranks": arguments.ranks,
        "sequence": arguments.sequence,
        "from": arguments.start,
        "to": arguments.to,
        "mode": arguments.mode,
        "trips": [summed(one) for one in trips],
        "steps": arguments.steps,
        "step_seconds": {name: {"median": medians[name], "range": [min(of), max(of)]} for name, of in seconds.items()},
        "step_ratio": medians["switched"] / medians["fresh"],
        "memory_bytes": memory,
        "memory_ratio": memory["switched"] / memory["fresh"],
        "flat": all(flat(one) == flat(trips[1]) for one in trips[1:]),
    }


def flat(ranks):
    """What must not grow, of each rank."""
    return [(one["descriptors"], one["threads"], one["groups"]) for one in ranks]


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="25m")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--from", dest="start", default="fsdp4", help="A")
    parser.add_argument("--to", default="fsdp2.tp2", help="B")
    parser.add_argument("--mode", default="keep", choices=("keep", "tight"))
    parser.add_argument("--sequence", type=int, default=128, help="tokens of each rank's one sequence a step")
    parser.add_argument("--trips", type=int, default=5, help="at least 2")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    return parser.parse_args(words)


def main():
    arguments = parse()
    made = record(arguments, measure(arguments))
    arguments.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"\n{'':10} {'step':>9} {'range':>15} {'memory':>10}")
    for name in JOBS:
        took, (low, high) = made["step_seconds"][name]["median"], made["step_seconds"][name]["range"]
        print(f"{name:10} {took:7.3f} s {low:7.3f}-{high:.3f} {made['memory_bytes'][name] / 1e6:7.0f} MB")
    print(f"{'ratio':10} {made['step_ratio']:9.3f} {'':15} {made['memory_ratio']:10.3f}")
    print(f"descriptors, threads and groups are {'the same after each' if made['flat'] else 'NOT the same after each'}")


if __name__ == "__main__":
    main()
