"""How long rounds of transfers take, when each rank goes on as soon as its own part of a round is done.

Within a round a transfer begins when both its ranks have come to it, and lasts as long as the busiest link that it
takes is busy with everything that this round puts on it: transfers that share a link share its rate, and none is done
before the link is. Nor is it done before its ranks have dealt with all their messages of the round, one behind the
other, while the links carry them. On top comes what each round costs, and what checksums take. In ``tight`` nobody
begins a round before everybody is done with the last. A link that ranks share over several rounds at once cannot be
done sooner than all its bytes are through: the longest such time is the least that comes out.

What ranks do themselves (copying, hashing, sending and receiving where that is a processor's work, dealing with pieces)
takes each of them its time; where the ranks of a node share fewer processors, the work of all, divided among these, is
one more link, which everybody takes who has something to do.

This is a model: links are full as soon as anything travels, and nobody is disturbed by training that goes on.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynatrain.plan.table import Ints
from dynatrain.simulate.links import Links
from dynatrain.simulate.machines import Machines
from dynatrain.simulate.traffic import Transfers

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What comes out.

    Attributes:
        seconds: until the last rank is done.
        sent: bytes that each rank sends to others.
        received: bytes that each rank receives from others.
        relaid: bytes that each rank keeps, and lays out anew.
        link: the link that is busy longest.
        link_bytes: what it carries, in all rounds.
        link_seconds: what that takes it at its rate.
        rounds: those in which anything is carried.
        messages: most that one rank sends or receives.
    """

    seconds: float
    sent: Ints
    received: Ints
    relaid: Ints
    link: str
    link_bytes: int
    link_seconds: float
    rounds: int
    messages: int


@dataclass(frozen=True, slots=True, eq=False)
class _Round:
    """One round: its transfers between ranks, how long each lasts, and how long each rank works, and hashes.

    ``shared`` is how long the processors of a rank's node have to do in this round.
    """

    transfers: Transfers
    src: Ints
    dst: Ints
    lasts: Floats
    works: Floats
    hashes: Floats
    shared: Floats


def run(rounds: Iterable[Transfers], links: Links, ranks: int, *, together: bool = False) -> Outcome:
    """Carry ``rounds`` out.

    Args:
        rounds: in order; equal ones may be one value, which is looked at once.
        links: of the cluster.
        ranks: how many there are.
        together: everybody waits for everybody at the end of each round, as in ``tight``.
    """
    clock = np.zeros(ranks)
    known: dict[int, _Round] = {}
    times: Counter[int] = Counter()
    for transfers in rounds:
        key = id(transfers)
        if key not in known:
            known[key] = _round(transfers, links, ranks)  # which keeps the identity taken
        one = known[key]
        times[key] += 1
        after = clock + one.works
        done = np.maximum(clock[one.src], clock[one.dst]) + one.lasts
        for ends in (one.src, one.dst):
            np.maximum.at(after, ends, done)
        busy = one.works + one.hashes > 0
        after = np.maximum(after + one.hashes, np.where(busy, clock + one.shared, 0.0))
        clock = np.full(ranks, after.max() + links.machines.vote_us * 1e-6) if together else after
    counted = [(known[key], count) for key, count in times.items()]
    shared = sum((one.shared * count for one, count in counted), start=np.zeros(ranks))
    seconds = max(float(clock.max()), float(shared.max()))
    return _outcome(seconds, [(one.transfers, count) for one, count in counted], links, ranks)


def _round(transfers: Transfers, links: Links, ranks: int) -> _Round:
    machines = links.machines
    src, dst, nbytes = _away(transfers)
    taken = links.of(src, dst)
    count = _messages(transfers, machines.message_bytes, ranks)
    messages = count * machines.message_us * 1e-6
    through = (_load(taken, nbytes, links) / links.rate)[taken].max(axis=0, initial=0.0)
    lasts = np.maximum(through, np.maximum(messages[src], messages[dst])) + machines.round_us * 1e-6
    works = _work(transfers, machines, ranks)
    hashed = _sums(src, nbytes, ranks) + _sums(dst, nbytes, ranks)
    hashes = hashed / (1e9 * machines.checksum_gb_s or np.inf)
    posts = messages + (count > 0) * machines.round_us * 1e-6
    return _Round(transfers, src, dst, lasts, works, hashes, _shared(works + hashes + posts, machines))


def _work(transfers: Transfers, machines: Machines, ranks: int) -> Floats:
    """Seconds that each rank's processor needs, but for hashing."""
    src, dst, nbytes = _away(transfers)
    work = _sums(transfers.dst, transfers.nbytes, ranks) / (1e9 * machines.copy_gb_s)
    work += _sums(src, nbytes, ranks) / (1e9 * machines.send_gb_s or np.inf)
    work += _sums(dst, nbytes, ranks) / (1e9 * machines.receive_gb_s or np.inf)
    pieces = _sums(transfers.dst, transfers.pieces, ranks) + _sums(src, transfers.pieces[_is_away(transfers)], ranks)
    return work + pieces * machines.piece_us * 1e-6


def _shared(work: Floats, machines: Machines) -> Floats:
    """What the processors of each rank's node have to do; nothing where ranks have processors of their own."""
    if not machines.processors:
        return np.zeros_like(work)
    nodes = np.arange(len(work)) // machines.ranks_per_node
    return np.asarray(np.bincount(nodes, work)[nodes] / machines.processors)


def _outcome(seconds: float, rounds: list[tuple[Transfers, int]], links: Links, ranks: int) -> Outcome:
    """Sums over all rounds, each with how often it came."""
    sent, received, relaid, messages = np.zeros((4, ranks), np.int64)
    load = np.zeros(len(links.rate), np.int64)
    for transfers, count in rounds:
        src, dst, nbytes = _away(transfers)
        load += _load(links.of(src, dst), nbytes, links) * count
        sent += _sums(src, nbytes, ranks) * count
        received += _sums(dst, nbytes, ranks) * count
        stays = transfers.src == transfers.dst
        relaid += _sums(transfers.dst[stays], transfers.nbytes[stays], ranks) * count
        messages += _messages(transfers, links.machines.message_bytes, ranks) * count
    spent = load / links.rate
    link = int(spent.argmax())
    return Outcome(
        seconds=max(seconds, float(spent[link])) + links.machines.switch_us * 1e-6,
        sent=sent,
        received=received,
        relaid=relaid,
        link=links.name(link),
        link_bytes=int(load[link]),
        link_seconds=float(spent[link]),
        rounds=sum(count for transfers, count in rounds if len(transfers.src)),
        messages=int(messages.max()),
    )


def _is_away(transfers: Transfers) -> npt.NDArray[np.bool_]:
    return np.asarray(transfers.src != transfers.dst)


def _away(transfers: Transfers) -> tuple[Ints, Ints, Ints]:
    away = _is_away(transfers)
    return transfers.src[away], transfers.dst[away], transfers.nbytes[away]


def _load(taken: Ints, nbytes: Ints, links: Links) -> Ints:
    """Bytes that each link carries; the one that is none carries nothing."""
    load = _sums(taken.ravel(), np.tile(nbytes, len(taken)), len(links.rate))
    load[-1] = 0
    return load


def _messages(transfers: Transfers, message_bytes: int, ranks: int) -> Ints:
    """Messages that each rank sends, or receives, whichever are more."""
    src, dst, nbytes = _away(transfers)
    count = -(-nbytes // message_bytes)
    return np.maximum(_sums(src, count, ranks), _sums(dst, count, ranks))


def _sums(where: Ints, what: Ints, size: int) -> Ints:
    return np.bincount(where, what, size).astype(np.int64)  # exact: far fewer bytes than 2**53
