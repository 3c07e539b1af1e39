"""What the wires and the memory of this world give: a probe that shares no code with the execution.

All ranks work at once, as in a switch. The link rate is bytes per second that each rank sends and receives at the same
time; the copy rate is what all ranks of one machine together write.
"""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates.

    Attributes:
        link_bytes_per_second: one way per rank, while all ranks send and receive.
        copy_bytes_per_second: memory written per machine, while all its ranks copy.
    """

    link_bytes_per_second: float
    copy_bytes_per_second: float


def probe(
    group: dist.ProcessGroup, device: torch.device, *, nbytes: int, repeats: int, ranks_per_node: int | None = None
) -> Rates:
    """Measure; the best of ``repeats`` counts, since what disturbs only slows. Collective over ``group``.

    Args:
        group: all ranks; used for nothing else meanwhile.
        device: where state lies.
        nbytes: sent and copied by each rank each time.
        repeats: tries.
        ranks_per_node: ranks that share a machine's memory; None for all.
    """
    world, rank = group.size(), group.rank()
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    link = min((_exchange(group, rank, world, source, target) for _ in range(repeats)), default=1.0)
    copy = min((_copy(group, source, target) for _ in range(repeats)), default=1.0)
    slowest = torch.tensor([link, copy], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return Rates(nbytes / float(slowest[0]), nbytes * (ranks_per_node or world) / float(slowest[1]))


def _exchange(group: dist.ProcessGroup, rank: int, world: int, source: torch.Tensor, target: torch.Tensor) -> float:
    """Seconds to send to the next rank of a ring and receive from the one before."""
    dist.barrier(group=group)
    began = time.perf_counter()
    if world > 1:
        works = [
            dist.irecv(target, group=group, group_src=(rank - 1) % world),
            dist.isend(source, group=group, group_dst=(rank + 1) % world),
        ]
        for work in works:
            work.wait()
    return time.perf_counter() - began


def _copy(group: dist.ProcessGroup, source: torch.Tensor, target: torch.Tensor) -> float:
    dist.barrier(group=group)
    began = time.perf_counter()
    target.copy_(source)
    if source.device.type == "cuda":
        torch.cuda.synchronize(source.device)
    return time.perf_counter() - began
