"""``dynatrain bench switch``: how fast state changes its layout, beside what PyTorch offers for it.

Ranks are forked from this process, which must have one thread only. All methods of a case are measured in turn, again
and again, so that what disturbs the machine disturbs all of them; medians are told, with the extremes. A restart, which
ends the ranks, comes after the others.
"""

import faulthandler
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

# Late imports of torch, which every rank would repeat: done once, before the fork.
import torch
import torch._dynamo
import torch.distributed as dist

from dynatrain.cluster.kernel import (
    AGENT_PRIORITY,
    RANK_PRIORITY,
    leave_realtime,
    signal_me_when_parent_ends,
    take_realtime,
)
from dynatrain.space.decoder import DecoderShape
from dynatrain.train.bench_rank import DEADLINE, RESTART, Bench, Case, Sample
from dynatrain.train.restart import RestartError, begin_anew
from dynatrain.train.restart_order import CHECKPOINT

OURS = ("dynatrain/keep", "dynatrain/keep/gloo", "dynatrain/tight", "dynatrain/tight/gloo")
"""Both modes, by the nearest transport and, with ``/gloo``, by the group's alone."""

METHODS = (*OURS, "hand_written", "dcp", "full_tensor", "redistribute", "reload", RESTART)
"""In the order of measuring. ``hand_written``: new tensors, and every box that changes ranks by isend and irecv.
``dcp``: save, to tmpfs unless another folder is named, and load into given tensors. ``full_tensor``: every tensor whole
on every rank, then a slice. ``redistribute``: of DTensor. ``reload``: save, build anew, load, in the same processes.
``restart``: save, end; new processes under torchrun import, build, load. It ends ranks, so it comes after all others,
with ranks of its own for each run."""

TMPFS = Path("/dev/shm")  # noqa: S108 - tmpfs is the point: a disk is measured where it is named
Tell = Callable[[str], None]


class BenchError(RuntimeError):
    """A rank of a bench failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method in one case: medians over the runs, each of which counts its slowest rank.

    Attributes:
        case: ``FROM -> TO``.
        method: ``dynatrain``, or another of :data:`METHODS`.
        mode: ``keep`` or ``tight`` of ``dynatrain``; empty for the others.
        transport: what carried the moves of ``dynatrain``, as certificates call it; empty for the others.
        seconds: in which the state moves; None where the method has no way. Of ``restart`` the same as the stall.
        stall_seconds: in which nothing can be trained; of ``restart`` from the begin of the save until the last new
            rank could train.
        lost_seconds: None: nothing is trained here.
        bytes: that must change ranks, whatever the method.
        floor_seconds: least seconds of the move at the rates that a probe measured before each run.
        ratio: of seconds to floor.
        digest_seconds: of seconds, what checksums took on the slowest rank; None for other methods. In ``keep`` senders
            take theirs after the stall.
        digest_floor_seconds: what checksums of ``bytes`` at both ends take all ranks together, at a measured rate.
        peak_bytes: most resident bytes of a rank beyond what its process takes without state, by the kernel's count.
        link_gb_s: bytes that must change ranks, by seconds.
        counted_bytes: most bytes on a rank by the pool's count, staging included; 0 for other methods.
        allowed_bytes: max(old, new) + budget of the rank that comes nearest to it; 0 but in ``tight``.
        seconds_range: least and most.
        runs: how many.
        phases: medians of the switch's phases; of a restart: ``save``, ``start`` (until a new rank has imported what it
            needs), ``build``, ``load``.
        probed: medians of the rates, in GB/s, that a probe measured before each run: one ``link`` alone, all links at
            once (``wire``), all memories at once (``copy``); ``group_link`` and ``group_wire`` by the process group
            even where memory is nearer; checksums of all ranks together (``digest``).
        note: why there are no numbers.
    """

    case: str
    method: str
    mode: str
    transport: str
    seconds: float | None
    stall_seconds: float | None
    lost_seconds: None
    bytes: int
    floor_seconds: float
    ratio: float | None
    digest_seconds: float | None
    digest_floor_seconds: float
    peak_bytes: int
    link_gb_s: float | None
    counted_bytes: int
    allowed_bytes: int
    seconds_range: tuple[float, float] | None
    runs: int
    phases: dict[str, float]
    probed: dict[str, float]
    note: str


def run_bench(
    shape: DecoderShape,
    cases: Sequence[Case],
    *,
    ranks: int,
    repeats: int,
    slow_repeats: int,
    tell: Tell,
    checkpoints: Path = TMPFS,
) -> tuple[Row, ...]:
    """Measure all methods in all cases.

    Args:
        shape: of the model; its state is that of AdamW in fp32.
        cases: pairs of legal layouts of ``ranks`` ranks.
        ranks: processes.
        repeats: runs of ``dynatrain`` in each mode.
        slow_repeats: runs of the other methods, which take ten times as long; at most ``repeats``.
        tell: gets a line at each step.
        checkpoints: where ``dcp``, ``reload`` and ``restart`` write, in a folder of their own, which is removed.

    Raises:
        BenchError: a rank failed, of the old ones or of the new ones of a restart; or other state arrived than was
            there, with the name of every method of which that holds.
    """
    staying = tuple(method for method in METHODS if method != RESTART)
    schedule = [(case, staying if number < slow_repeats else OURS) for number in range(repeats) for case in cases]
    restarts = [case for _ in range(slow_repeats) for case in cases if RESTART in METHODS]
    folder = Path(tempfile.mkdtemp(prefix=f"dynatrain-bench-{os.getpid()}-", dir=checkpoints))
    found: list[list[Sample]] = []
    try:
        restarted = (_restarted(shape, case, ranks, folder / RESTART) for case in restarts)
        for together in chain(_everywhere(shape, schedule, ranks, folder / CHECKPOINT), restarted):
            found.append(together)
            tell(_line(together))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    by_row: defaultdict[tuple[Case, str, str, str], list[list[Sample]]] = defaultdict(list)
    for together in found:
        first = together[0]
        by_row[first.case, first.method, first.mode, first.transport].append(together)
    if wrong := list(dict.fromkeys(problem for runs in by_row.values() for problem in _problems(runs))):
        raise BenchError("\n".join(wrong))
    return tuple(_row(runs) for runs in by_row.values())


def _line(together: Sequence[Sample]) -> str:
    first = together[0]
    name = f"{first.case[0]} -> {first.case[1]}  {first.method} {first.mode} {first.transport}".rstrip()
    if (seconds := _slowest(sample.seconds for sample in together)) is None:
        return f"{name}: not possible: {first.problem}"
    return f"{name}: {seconds:.3f} s, floor {first.floor_seconds:.3f} s"


def _problems(runs: Iterable[Sequence[Sample]]) -> Iterator[str]:
    """What did not arrive, where something was to arrive."""
    for sample in (sample for together in runs for sample in together):
        if sample.problem and sample.seconds is not None:
            yield f"{sample.case[0]} -> {sample.case[1]}, {sample.method}: {sample.problem}"


def _row(runs: Sequence[Sequence[Sample]]) -> Row:
    first, everybody = runs[0][0], [sample for together in runs for sample in together]
    seconds = [value for together in runs if (value := _slowest(s.seconds for s in together)) is not None]
    stalls = [value for together in runs if (value := _slowest(s.stall_seconds for s in together)) is not None]
    floor = statistics.median(together[0].floor_seconds for together in runs)
    ratios = [value / together[0].floor_seconds for value, together in zip(seconds, runs, strict=False)]
    middle = statistics.median(seconds) if seconds else None
    nearest = max(everybody, key=lambda sample: sample.counted_bytes - sample.allowed_bytes)
    names, rates = first.phases or {}, [together[0].probed or {} for together in runs]
    return Row(
        case=f"{first.case[0]} -> {first.case[1]}",
        method=first.method,
        mode=first.mode,
        transport=first.transport,
        seconds=middle,
        stall_seconds=statistics.median(stalls) if stalls else None,
        lost_seconds=None,
        bytes=first.bytes,
        floor_seconds=floor,
        ratio=statistics.median(ratios) if ratios else None,
        digest_seconds=(
            statistics.median(max(sample.digest_seconds for sample in together) for together in runs)
            if first.method == "dynatrain"
            else None
        ),
        digest_floor_seconds=statistics.median(together[0].digest_floor_seconds for together in runs),
        peak_bytes=int(statistics.median(max(sample.peak_bytes for sample in together) for together in runs)),
        link_gb_s=first.bytes / middle / 1e9 if middle else None,
        counted_bytes=nearest.counted_bytes,
        allowed_bytes=nearest.allowed_bytes,
        seconds_range=(min(seconds), max(seconds)) if seconds else None,
        runs=len(seconds),
        phases={
            name: statistics.median(max((s.phases or {})[name] for s in together) for together in runs)
            for name in names
        },
        probed={name: statistics.median(found[name] for found in rates) for name in rates[0]},
        note=first.problem,
    )


def _slowest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _everywhere(
    shape: DecoderShape, schedule: Sequence[tuple[Case, Sequence[str]]], ranks: int, folder: Path
) -> Iterable[list[Sample]]:
    """Each measurement as all ranks saw it, rank 0 first."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ports: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    ends = [context.Pipe(duplex=False) for _ in range(ranks)]
    job = _Job(shape, schedule, ranks, folder)
    workers = [
        context.Process(target=_rank, args=(job, rank, ports, ends[rank][1]), daemon=True) for rank in range(ranks)
    ]
    try:
        for worker in workers:
            worker.start()
        for _, sending in ends:
            sending.close()
        # Above the ranks, as an agent is: what holds the store must answer while they are busy.
        realtime = take_realtime(AGENT_PRIORITY)
        server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        if realtime:
            leave_realtime()
        for _ in workers:
            ports.put(server.port)
        for _ in range(sum(len(methods) for _, methods in schedule)):
            yield _gather([receiving for receiving, _ in ends])
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _restarted(shape: DecoderShape, case: Case, ranks: int, folder: Path) -> list[Sample]:
    """One cold restart: ranks that hold the state save it and end, and others begin from what they saved."""
    folder.mkdir()
    try:
        (saved,) = _everywhere(shape, [(case, (RESTART,))], ranks, folder / CHECKPOINT)  # they have ended then
        begun = begin_anew(folder, ranks, timeout=DEADLINE)
    except RestartError as error:
        raise BenchError(f"{case[0]} -> {case[1]}, {RESTART}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    began = min(one.saved_at - (one.seconds or 0.0) for one in saved)
    whole = max(one.saved_at for one in saved)
    return [
        replace(
            old,
            seconds=new.ready - began,
            stall_seconds=new.ready - began,
            peak_bytes=new.peak_bytes,
            phases={
                "save": whole - began,
                "start": new.imported - whole,
                "build": new.built - new.imported,
                "load": new.ready - new.built,
            },
            problem="" if new.arrived else "the state that arrived is another",
        )
        for old, new in zip(saved, begun, strict=True)
    ]


def _gather(ends: Sequence[Connection]) -> list[Sample]:
    """One message of every rank."""
    found: dict[int, Sample] = {}
    while len(found) < len(ends):
        for ready in wait([end for rank, end in enumerate(ends) if rank not in found]):
            rank = ends.index(ready)  # type: ignore[arg-type]
            try:
                told = ends[rank].recv()
            except EOFError as error:
                raise BenchError(f"rank {rank} ended without a word") from error
            if isinstance(told, str):
                raise BenchError(f"rank {rank}: {told}")
            found[rank] = told
    return [found[rank] for rank in range(len(ends))]


@dataclass(frozen=True, slots=True)
class _Job:
    """What every rank is told."""

    shape: DecoderShape
    schedule: Sequence[tuple[Case, Sequence[str]]]
    ranks: int
    folder: Path


def _rank(job: _Job, rank: int, ports: "multiprocessing.SimpleQueue[int]", end: Connection) -> NoReturn:
    """The life of one forked rank."""
    signal_me_when_parent_ends(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent ends its ranks
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    take_realtime(RANK_PRIORITY)
    try:
        store = dist.TCPStore("127.0.0.1", ports.get(), None, is_master=False, timeout=timedelta(seconds=300))
        start = job.schedule[0][0][0]
        bench = Bench(job.shape, store, rank=rank, ranks=job.ranks, folder=job.folder, start=start)
        for case, methods in job.schedule:
            for sample in bench.samples(case, methods):
                end.send(sample)
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is told
        end.send("".join(traceback.format_exception_only(error)).strip())
    sys.stderr.flush()
    os._exit(0)  # no shutdown: destructors of groups would wait for peers that may be gone
