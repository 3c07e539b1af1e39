"""A description of one machine, or of links, out of what a probe has measured there.

What has been held against real switches so far: nothing on GPUs. The bench's probe gives the three rates, of gloo or
of memory; what ranks do beside moving bytes (checksums, putting tensors into modules) is in no probe, and not in here.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dynatrain.simulate.machines import MachineError, Machines


def latency_and_rate(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds that a message costs beside its bytes, and bytes per second, by least squares of relative errors.

    Args:
        samples: bytes of a message, and the seconds that it took; of two lengths at least.

    Raises:
        MachineError: the samples have one length, or seconds that do not grow with bytes.
    """
    nbytes, seconds = (np.array(column, np.float64) for column in zip(*samples, strict=True))
    if len(np.unique(nbytes)) < 2:
        raise MachineError("no rate can be fitted", ("messages of two lengths are needed at least",))
    design = np.stack([1 / seconds, nbytes / seconds], axis=1)
    (latency, each), *_ = np.linalg.lstsq(design, np.ones(len(seconds)), rcond=None)
    if each <= 0:
        raise MachineError("no rate can be fitted", ("the seconds of longer messages are not more",))
    return max(0.0, float(latency)), 1 / float(each)


def one_machine(
    *,
    ranks: int,
    link_bytes_per_second: float,
    wire_bytes_per_second: float,
    copy_bytes_per_second: float,
    message_seconds: float = 0.0,
) -> Machines:
    """One machine whose ranks share processors and memory, as the bench's probe (``train.probe``) sees it.

    Args:
        ranks: on it, all at once.
        link_bytes_per_second: one rank to one other, all others idle.
        wire_bytes_per_second: received by all ranks together, while all send and receive.
        copy_bytes_per_second: written by all ranks together, while all copy.
        message_seconds: of :func:`latency_and_rate`.
    """
    return replace(
        Machines(ranks_per_node=ranks, nvlink_gb_s=link_bytes_per_second / 1e9),
        fabric_gb_s=wire_bytes_per_second / 1e9,
        copy_gb_s=copy_bytes_per_second / ranks / 1e9,
        message_us=message_seconds * 1e6,
    )
