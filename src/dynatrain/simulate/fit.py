"""A description of one machine, or of links, out of what a probe, or real switches, have measured there.

The bench's probe gives rates of copies and of links. What ranks do beside moving bytes (packing, checksums, putting
tensors into modules) is in no probe; :func:`from_switches` finds it from some real switches, and others are then
foretold: ``benchmarks/simulated.py`` holds that against measurements on one machine. Nothing was held against GPUs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from dynatrain.simulate.machines import MachineError, Machines
from dynatrain.simulate.traffic import Transfers


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
    processors: int = 0,
) -> Machines:
    """One machine whose ranks share processors and memory, as the bench's probe (``train.probe``) sees it.

    Args:
        ranks: on it, all at once.
        link_bytes_per_second: one rank to one other, all others idle.
        wire_bytes_per_second: received by all ranks together, while all send and receive.
        copy_bytes_per_second: written by all ranks together, while all copy.
        message_seconds: of :func:`latency_and_rate`.
        processors: that the ranks share; 0 where there are at least as many as ranks.
    """
    return replace(
        Machines(ranks_per_node=ranks, nvlink_gb_s=link_bytes_per_second / 1e9),
        fabric_gb_s=wire_bytes_per_second / 1e9,
        copy_gb_s=copy_bytes_per_second / min(ranks, processors or ranks) / 1e9,
        processors=processors,
        message_us=message_seconds * 1e6,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the processors of one machine have to do in a switch: for the busiest rank, or each of them for all ranks.

    Attributes:
        written: bytes.
        sent: bytes.
        received: bytes.
        pieces: boxes of one state, counted at each end.
        messages: of the longer of both directions.
        rounds: in which a rank takes part.
    """

    written: float
    sent: float
    received: float
    pieces: float
    messages: float
    rounds: float


def work_of(rounds: Iterable[Transfers], ranks: int, *, processors: int, message_bytes: int) -> Work:
    """The work of ``rounds``, which ``ranks`` ranks on one machine carry out, which share ``processors``."""
    total = np.zeros((6, ranks))
    for one in rounds:
        away = one.src != one.dst
        src, dst, nbytes, pieces = one.src[away], one.dst[away], one.nbytes[away], one.pieces[away]
        count = -(-nbytes // message_bytes)
        messages = np.maximum(np.bincount(src, count, ranks), np.bincount(dst, count, ranks))
        ends = np.bincount(one.dst, one.pieces, ranks) + np.bincount(src, pieces, ranks)
        moved = np.bincount(src, nbytes, ranks), np.bincount(dst, nbytes, ranks)
        total += [np.bincount(one.dst, one.nbytes, ranks), *moved, ends, messages, messages > 0]
    written, sent, received, pieces, messages, takes_part = np.maximum(total.max(1), total.sum(1) / processors).tolist()
    return Work(written=written, sent=sent, received=received, pieces=pieces, messages=messages, rounds=takes_part)


def from_switches(machines: Machines, samples: Sequence[tuple[Work, float]], *, reads: bool) -> Machines:
    """``machines`` with what its processors need, by least squares of relative errors over real switches.

    What is written takes what ``copy_gb_s`` says. Nothing comes out negative: of all choices of terms that stay at 0
    the best counts.

    Args:
        machines: of :func:`one_machine`, which knows how many processors it has.
        samples: the work of a switch, and the seconds that it took.
        reads: receivers read what senders hold, who then have nothing to do for bytes; else both ends work alike.

    Raises:
        MachineError: there are fewer samples than terms.
    """
    design = np.array([_terms(work, reads=reads) for work, _ in samples], np.float64)
    if len(samples) <= design.shape[1]:
        raise MachineError("no costs can be fitted", (f"{design.shape[1] + 1} switches are needed at least",))
    took = np.array([seconds for _, seconds in samples])
    copies = np.array([work.written for work, _ in samples]) / (1e9 * machines.copy_gb_s)
    switch, byte, piece, message, round_ = _not_negative(design / took[:, None], 1 - copies / took)
    each = 1 / (1e9 * byte) if byte else 0.0
    return replace(
        machines,
        send_gb_s=0.0 if reads else each,
        receive_gb_s=each,
        piece_us=piece * 1e6,
        message_us=message * 1e6,
        round_us=round_ * 1e6,
        switch_us=switch * 1e6,
    )


def _terms(work: Work, *, reads: bool) -> tuple[float, ...]:
    return 1.0, work.received + (0.0 if reads else work.sent), work.pieces, work.messages, work.rounds


def _not_negative(design: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> list[float]:
    """The least squares among solutions without negative numbers, of few columns: every choice of them is tried."""
    columns = range(design.shape[1])
    best, least = np.zeros(len(columns)), float((wanted**2).sum())
    for chosen in (list(some) for count in columns for some in combinations(columns, count + 1)):
        found, *_ = np.linalg.lstsq(design[:, chosen], wanted, rcond=None)
        error = float(((design[:, chosen] @ found - wanted) ** 2).sum())
        if found.min() >= 0 and error < least:
            best, least = np.zeros(len(columns)), error
            best[chosen] = found
    return [float(value) for value in best]
