"""What the wires and the memory of this world give: a probe that shares no code with the execution.

Three rates, each the best of several tries, because what disturbs only slows: one link alone, all links at once, and
all memories at once. Where all ranks are on the host of one machine, a link is never slower than a copy: who receives
can read what the other holds. Buffers are larger than caches and were written before. Time is counted from a common
start to the end of the last rank.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash

MESSAGE_BYTES = (1 << 20, 4 << 20, 64 << 20)
"""Lengths of message that are tried; which is fastest differs from machine to machine."""


_STRETCH = 1 << 20
"""Bytes that are hashed at once, and stay in the cache."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates, in bytes per second.

    Attributes:
        link_bytes_per_second: one rank to one other, one way, while all others are idle.
        wire_bytes_per_second: received by all ranks of one machine together, while all send and receive.
        copy_bytes_per_second: memory written per machine, while all its ranks copy.
        group_link_bytes_per_second: as the first, but by the process group even where memory is nearer.
        group_wire_bytes_per_second: as the second, likewise.
    """

    link_bytes_per_second: float
    wire_bytes_per_second: float
    copy_bytes_per_second: float
    group_link_bytes_per_second: float
    group_wire_bytes_per_second: float


def probe(
    group: dist.ProcessGroup, device: torch.device, *, nbytes: int, repeats: int, ranks_per_node: int | None = None
) -> Rates:
    """Measure. Collective over ``group``.

    Args:
        group: all ranks; used for nothing else meanwhile.
        device: where state lies.
        nbytes: sent, received and copied by each rank each time.
        repeats: tries.
        ranks_per_node: ranks that share a machine's memory; None for all.
    """
    world, rank = group.size(), group.rank()
    here = ranks_per_node or world
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def best(work: Callable[[], None]) -> float:
        return min(_together(group, device, work) for _ in range(repeats))

    copy = nbytes * here / best(lambda: _copy(source, target))
    if world == 1:
        return Rates(copy, copy, copy, copy, copy)
    pair = {0: (1, None), 1: (None, 0)}
    ring = {me: ((me + 1) % world, (me - 1) % world) for me in range(world)}

    def quickest(peers: dict[int, tuple[int | None, int | None]]) -> float:
        mine = peers.get(rank, (None, None))
        return min(best(lambda size=size: _transfer(group, mine, source, target, size)) for size in MESSAGE_BYTES)

    link, wire = by_group = nbytes / quickest(pair), nbytes * here / quickest(ring)
    if device.type == "cpu" and here == world:
        alone = best(lambda: _copy(source, target) if rank == 0 else None)
        link, wire = max(link, nbytes / alone), max(wire, copy)
    return Rates(link, wire, copy, *by_group)


def digest_rate(group: dist.ProcessGroup, device: torch.device, *, nbytes: int, repeats: int) -> float:
    """Bytes per second that all ranks' checksums take together where the bytes are in the cache. Collective.

    Args:
        group: all ranks; used for nothing else meanwhile.
        device: of the group's tensors.
        nbytes: hashed by each rank each time.
        repeats: tries, of which the best counts.
    """
    stretch = bytes(_STRETCH)

    def hashes() -> None:
        for _ in range(-(-nbytes // _STRETCH)):
            xxhash.xxh3_64_intdigest(stretch)

    return nbytes * group.size() / min(_together(group, device, hashes) for _ in range(repeats))


def _together(group: dist.ProcessGroup, device: torch.device, work: Callable[[], None]) -> float:
    """Seconds from the start that all ranks share to the end of the last one."""
    dist.barrier(group=group)
    began = time.perf_counter()
    work()
    dist.barrier(group=group)
    # A rank that the kernel let start late has measured too little; the first to start has measured all.
    span = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=device)
    dist.all_reduce(span, op=dist.ReduceOp.MAX, group=group)
    return float(span)


def _transfer(
    group: dist.ProcessGroup,
    peers: tuple[int | None, int | None],
    source: torch.Tensor,
    target: torch.Tensor,
    size: int,
) -> None:
    """Send ``source`` to one peer and fill ``target`` from another, in messages of ``size``; either may be None."""
    to, frm = peers
    works = []
    if frm is not None:
        works += [dist.irecv(part, group=group, group_src=frm) for part in target.split(size)]
    if to is not None:
        works += [dist.isend(part, group=group, group_dst=to) for part in source.split(size)]
    for work in works:
        work.wait()


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)
    if source.device.type == "cuda":
        torch.cuda.synchronize(source.device)
