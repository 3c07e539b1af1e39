"""Measure saves and resumes beside PyTorch's: ``python benchmarks/save.py [--model 200m] [--ranks 4] [--repeats 5]``.

Forked ranks train for real, four of them in fsdp4. In turn the job saves itself and is saved by
``torch.distributed.checkpoint.async_save``; then its checkpoint is loaded into other layouts, in turn by us and by
``dcp.load`` into the same tensors. Every load is checked: all bits must be those of the first. Writes ``save.json``.

What is measured, each time on the slowest rank:

- stall: seconds in which the training thread does nothing but what the save wants of it. Ours: the begin at the step
  edge, and what ``optimizer.step`` waits for. DCP's: the call of ``async_save``. Work: the seconds that the training
  thread had the processor in it; for the rest it waited, where ranks and their threads are more than cores.
- lost: how much longer the steps took, from a save's begin to its end, than as many of the median step without one.
- load: from files to filled tensors, everything that either does for that. Cold: after ``fsync`` and
  ``posix_fadvise(DONTNEED)`` on every file; what the disk or the host below keep in their own memory is out of reach.
- peak: anonymous memory of a rank (sampled; pages of mapped files are not in it): of a load, beyond what it had before,
  when all its pieces were there already; of a save, beyond the peak of steps without one.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
import traceback
import warnings
from collections import defaultdict
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # late imports of torch, which every rank would repeat
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dynatrain.cluster.board import Board
from dynatrain.cluster.kernel import AGENT_PRIORITY, RANK_PRIORITY, leave_realtime, take_realtime
from dynatrain.data.samples import Samples
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import parse_layout
from dynatrain.models.decoder import canonical_name
from dynatrain.observe.checkpoints import newest
from dynatrain.space.presets import resolve_model
from dynatrain.train.keys import flat, granule_path
from dynatrain.train.optimizer import OptimizerSettings
from dynatrain.train.parallel import Precision
from dynatrain.train.saving import Saves
from dynatrain.train.states import optimizer_states
from dynatrain.train.switcher import Switcher
from dynatrain.train.trainer import Job, Trainer

LAYOUTS = {1: ("dp1",), 2: ("fsdp2", "tp2", "pp2"), 4: ("fsdp4", "fsdp2.tp2", "pp2.fsdp2")}
"""By ranks: in which they train, and into which their checkpoint is loaded."""
WARM, STEADY = 2, 3
DEADLINE = 300.0


class Rank:
    """One rank's part; ``tell`` gets ``(what, method, {quantity: number})``."""

    def __init__(self, arguments, store, rank, tell):
        self.rank, self.store, self.tell, self.arguments = rank, store, tell, arguments
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("default", store),
            rank=rank,
            world_size=arguments.ranks,
            timeout=timedelta(seconds=DEADLINE),
        )
        self.beside = dist.new_group()  # async_save must not share training's group
        self.shape = resolve_model(arguments.model)
        self.job = Job(
            shape=self.shape,
            seed=1,
            precision=Precision(),
            optimizer=OptimizerSettings(),
            global_sequences=arguments.ranks,
            micro_sequences=1,
        )
        self.seconds, self.start = [], LAYOUTS[arguments.ranks][0]

    def switcher(self, layout, **more):
        return Switcher(
            self.job.build,
            layout=layout,
            state={"schedule": self.job.scheduler},
            initial=self.job.initial,
            names=canonical_name,
            deadline=DEADLINE,
            board=Board(dist.PrefixStore(f"board/{layout}", self.store.clone()), self.arguments.ranks),
            store=dist.PrefixStore(f"groups/{layout}", self.store),
            data_parallel="free",
            legal=lambda text, _: resolve(parse_layout(text), self.shape.num_hidden_layers),
            **more,
        )

    # Saves.

    def saves(self, root):
        self.ended = False
        sw = self.switcher(self.start, saves=Saves(root=root / "ours", keep_last=1), on_saved=self._note)
        words = np.random.default_rng(1).integers(0, self.shape.vocab_size, 4000 * self.arguments.sequence)
        data = Samples(tokens=words.astype(np.uint16), sequence=self.arguments.sequence)
        self.trainer = Trainer(self.job, data, sw, lambda result: self.seconds.append(result.seconds))
        self._steps(sw, WARM)
        for number in range(self.arguments.repeats):
            self._steady(sw)
            self._ours(sw)
            self._steady(sw)
            self._dcp(sw, root / f"dcp{number}")
        del self.trainer
        sw.close()
        return newest(root / "ours")[0]

    def _steps(self, sw, count):
        self.trainer.run(sw.step + count)

    def _steady(self, sw):
        self.seconds.clear()
        with anonymous() as self.usual:
            self._steps(sw, STEADY)
        self.step_seconds = statistics.median(self.seconds)

    def _note(self, saved):
        assert saved.outcome != "failed", saved.message
        self.ended = True

    def _beyond(self, peak, sw):
        """What a save needs beside what a step does."""
        return {"peak": max(0, peak[0] - self.usual[0]), "pieces": sw._party.memory.held}

    def _until(self, sw, ended, began, first=0):
        """Train until all ranks see the save's end; ``first`` steps were trained since it ``began``."""
        steps = first
        while True:
            self._steps(sw, 1)
            steps += 1
            flag = torch.tensor(float(ended()))
            dist.all_reduce(flag)
            if flag == self.arguments.ranks:
                break
        lost = time.perf_counter() - began - steps * self.step_seconds
        return {"lost": lost, "steps": steps, "step": self.step_seconds}

    def _ours(self, sw):
        """Two steps pass from the wish to the begin: they are not counted."""
        self.ended, begins, waits = False, [], []
        with timed(sw._saver, "begin", begins), timed(sw._saver, "before_a_write", waits), anonymous() as peak:
            sw.save()
            while not begins:
                self._steps(sw, 1)  # the last of these is the save's first
            began = time.perf_counter() - self.seconds[-1]
            numbers = self._until(sw, lambda: self.ended, began, first=1)
        (begin, work), wait = begins[0], sum(seconds for seconds, _ in waits)
        stall = {"stall": begin + wait, "work": work, "wait": wait}
        self.tell(("save", "dynatrain", stall | numbers | self._beyond(peak, sw)))

    def _dcp(self, sw, folder):
        dist.barrier()
        with anonymous() as peak:
            began, worked = time.perf_counter(), time.thread_time()
            future = dcp.async_save(held(sw.world), checkpoint_id=folder, process_group=self.beside)
            stall, work = time.perf_counter() - began, time.thread_time() - worked
            numbers = self._until(sw, future.done, began)
        future.result()
        self.tell(
            ("save", "dcp async_save", {"stall": stall, "work": work, "wait": 0.0} | numbers | self._beyond(peak, sw))
        )
        if self.rank == 0:
            shutil.rmtree(folder)
        dist.barrier()

    # Loads.

    def loads(self, layout, folder):
        sw = self.switcher(layout)
        sw.load(folder)  # caches of the first use
        values = sw.world.values()
        right = {key: value.clone() for key, value in values.items()}
        memory = sw._party.memory
        for number in range(2 * self.arguments.repeats):
            cold = number % 2 == 1
            for method, work in (
                ("dynatrain", lambda: sw.load(folder)),
                ("dcp.load", lambda: dcp.load(held(sw.world), checkpoint_id=folder)),
            ):
                for value in values.values():
                    value.fill_(torch.nan)
                if cold and self.rank == 0:
                    forget(folder)
                dist.barrier()
                memory.peak = memory.held
                with anonymous() as peak:
                    began = time.perf_counter()
                    work()
                    seconds = time.perf_counter() - began
                wrong = [key for key, value in values.items() if not torch.equal(value, right[key])]
                assert not wrong, f"{method} into {layout}: {wrong[0]} is another"
                numbers = {"seconds": seconds, "peak": peak[0], "pieces": memory.held, "pool_peak": memory.peak}
                self.tell((f"load {self.start} -> {layout}, {'cold' if cold else 'cached'}", method, numbers))
        sw.close()


def held(world):
    """All of a rank's state under our keys, as DCP wants it: DTensors."""
    found = {
        flat(granule_path(n, entry.kind, first=True, forms={})): entry.value.detach()
        for n, entry in world.found.items()
    }
    for name, values in optimizer_states(world.optimizer, world.found).items():
        found |= {flat(granule_path(name, one.name, first=False, forms={})): value for one, value in values.items()}
    return found


@contextmanager
def timed(thing, name, seconds):
    """Append the seconds of each call of ``thing.name``: by the clock, and of the processor in this thread."""
    original = getattr(thing, name)

    def work(*given):
        began, worked = time.perf_counter(), time.thread_time()
        original(*given)
        seconds.append((time.perf_counter() - began, time.thread_time() - worked))

    setattr(thing, name, work)
    yield
    delattr(thing, name)


@contextmanager
def anonymous():
    """The most anonymous memory of this process beyond what it had; sampled every two milliseconds."""
    ctypes.CDLL(None).malloc_trim(0)
    over, peak, before = threading.Event(), [0], rss_anonymous()

    def look():
        while not over.wait(0.002):
            peak[0] = max(peak[0], rss_anonymous() - before)

    thread = threading.Thread(target=look)
    thread.start()
    yield peak
    over.set()
    thread.join()


def rss_anonymous():
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon")


def forget(folder):
    """Have the kernel drop its copies of the files."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def body(arguments, root, rank, ports, end):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    take_realtime(RANK_PRIORITY)
    try:
        store = dist.TCPStore("127.0.0.1", ports.get(), None, is_master=False, timeout=timedelta(seconds=DEADLINE))
        me = Rank(arguments, store, rank, end.send)
        folder = me.saves(root)
        for layout in LAYOUTS[arguments.ranks][1:]:
            me.loads(layout, folder)
        end.send(None)
    except BaseException:
        end.send(traceback.format_exc())
    os._exit(0)


def measure(arguments, root):
    """``{(what, method): [numbers of all ranks, of each run]}``."""
    context = multiprocessing.get_context("fork")
    ports, ends = context.SimpleQueue(), [context.Pipe(duplex=False) for _ in range(arguments.ranks)]
    workers = [
        context.Process(target=body, args=(arguments, root, rank, ports, ends[rank][1]), daemon=True)
        for rank in range(arguments.ranks)
    ]
    for worker in workers:
        worker.start()
    realtime = take_realtime(AGENT_PRIORITY)
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    if realtime:
        leave_realtime()
    for _, sending in ends:
        ports.put(server.port)
        sending.close()
    found = defaultdict(list)
    try:
        while (told := [receiving.recv() for receiving, _ in ends]) != [None] * arguments.ranks:
            assert all(isinstance(one, tuple) for one in told), "\n".join(one for one in told if isinstance(one, str))
            what, method, _ = told[0]
            found[what, method].append([numbers for *_, numbers in told])
            print(f"{what}  {method}  {slowest(found[what, method][-1])}", flush=True)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    return found


def slowest(ranks):
    return {name: round(max(numbers[name] for numbers in ranks), 4) for name in ranks[0]}


def rows(found):
    """Medians over the runs, each of its slowest rank, with the extremes."""
    made = []
    for (what, method), runs in found.items():
        row = {"what": what, "method": method, "runs": len(runs)}
        for name in runs[0][0]:
            values = [max(numbers[name] for numbers in ranks) for ranks in runs]
            row[name] = {"median": statistics.median(values), "range": [min(values), max(values)]}
        made.append(row)
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="200m")
    parser.add_argument("--ranks", type=int, default=4, choices=LAYOUTS, help="fewer leave cores to spare")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of each rank's one sequence a step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the system's temporary folder")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="dynatrain-save-", dir=arguments.folder))
    try:
        made = rows(measure(arguments, root))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    record = {"model": arguments.model, "ranks": arguments.ranks, "sequence": arguments.sequence, "rows": made}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in made:
        name = "stall" if "stall" in row else "seconds"
        low, high = row[name]["range"]
        print(
            f"{row['what']:40} {row['method']:16} {row[name]['median']:.3f} s  ({low:.3f}-{high:.3f})  x{row['runs']}"
        )


if __name__ == "__main__":
    main()
