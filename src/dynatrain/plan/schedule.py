"""The rounds of a switch: which granules travel together, in which order. Equal on every rank.

``keep`` needs no order for its memory: the old state lives on beside the new one. But where stages change, a rank sends
layers of one stage and receives those of another. In the order of names it would do the one after the other, with half
of its link idle each time; so each round has a part of what goes between each pair of stages.

``tight`` hands over granule by granule: a round allocates its granules' new pieces on every rank, moves, then gives
back their old pieces. In the order of names a change from fsdp to pp would first fill the first stage with its whole
model while nothing there is given back. So the order is chosen, greedily: of the granules that fit on every rank, the
one that leaves the ranks farthest below what they may hold, where a rank near its limit counts exponentially more than
a rank far from it.

How small can the budget be? Not always one granule. Let two stages of equal bytes become one fsdp group, the embedding
in one stage and the head in the other. When the embedding goes, each rank of the other stage takes its share and gives
nothing back; it is then a full share above its own size, on which the head's share comes next. So the default budget is
two of the largest shards, and more where the greedy choice finds no order in that: small shards that are only taken can
add up to more.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dynatrain.plan.errors import PlanError
from dynatrain.plan.plan import Granule, Schedule
from dynatrain.plan.storage import Storage
from dynatrain.plan.table import Ints
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue

ROUND_BYTES = 1 << 28
"""Bytes of whole tensors that travel in one round of ``keep``: among few ranks altogether, among more of them each."""

FEW_RANKS = 4
"""So many are few. Rounds of more ranks are larger, because what a round costs a rank beside its bytes stays the same,
and so that each round has granules of every pair of stages."""

STAGING_BYTES = 24 << 20
"""What a budget leaves to the execution, to pack boxes that are strided in local storage; pieces never use it. Less
would make messages so short that their latency shows."""


def round_bytes_of(ranks: int, each: int = ROUND_BYTES) -> int:
    """Bytes of whole tensors in one round of ``keep`` among ``ranks`` ranks; of few, ``each``."""
    return each * ranks if ranks > FEW_RANKS else each


def keep_schedule(catalogue: Catalogue, round_bytes: int, sides: tuple[Ownership, Ownership] | None = None) -> Schedule:
    """All granules, in as many rounds as rounds of ``round_bytes`` could carry them.

    Tensors between the same stages are a group. Each round has of every group the granules, in catalogue order, that
    end in its part of the group's bytes: all groups are through with the same part at any time. Bytes are those of
    whole tensors, a number that every rank has. A granule larger than ``round_bytes`` is not divided.

    Args:
        catalogue: the tensors.
        round_bytes: of one round.
        sides: the ownerships before and after; without them, all tensors are one group.
    """
    granules = [(index, at) for index, tensor in enumerate(catalogue) for at in range(len(tensor.states))]
    sizes = [catalogue[index].nbytes(catalogue[index].states[at]) for index, at in granules]
    stages = [tuple(side.placements[tensor.name].stages for side in sides or ()) for tensor in catalogue]
    total, through = Counter[object](), Counter[object]()
    for (index, _), size in zip(granules, sizes, strict=True):
        total[stages[index]] += size
    rounds: list[list[Granule]] = [[] for _ in range(max(1, -(-sum(sizes) // round_bytes)))]
    for (index, at), size in zip(granules, sizes, strict=True):
        group = stages[index]
        through[group] += size
        rounds[max(0, through[group] * len(rounds) - 1) // max(1, total[group])].append((index, at))
    return Schedule(rounds=tuple(map(tuple, filter(None, rounds))), mode="keep")


def default_budget(storage: Storage) -> int:
    """Bytes above ``max(old, new)`` that ``tight`` may hold where the user names no budget: an order fits in them.

    Two of the largest target shards of one tensor of one state on one rank, a quarter more at a time where no order is
    found in that, and :data:`STAGING_BYTES`.
    """
    joined = storage.joined()
    return _enough(_Ledger.of(joined), 2 * int(joined.taken.max(initial=0))) + STAGING_BYTES


def tight_schedule(storage: Storage, budget_bytes: int) -> Schedule:
    """Rounds in an order in which no rank ever holds more than it may.

    That is ``max(old, new) + budget_bytes``: pieces, and :data:`STAGING_BYTES` for the execution. Granules that are
    adopted everywhere go first; what lies in one storage goes together. Consecutive granules share a round while their
    new pieces fit together. Scores are floating point, whose last bits differ between processors: one rank computes
    this, and tells it to all.

    Args:
        storage: what each granule takes and gives back on each rank.
        budget_bytes: at least the largest target shard of one tensor of one state, and :data:`STAGING_BYTES`.

    Raises:
        PlanError: no order was found that fits; the text has the rank, the bytes, and a budget that suffices.
    """
    room = budget_bytes - STAGING_BYTES
    members, storage = storage.members(), storage.joined()
    ledger = _Ledger.of(storage)
    order, worst = _order(ledger, room)
    if worst > room:
        largest = int(storage.taken.max(initial=0))
        enough = _enough(ledger, max(room, largest))
        raise PlanError(
            f"no order of hand-overs was found that keeps every rank within max(old, new) + {budget_bytes} bytes: the "
            f"best one exceeds max(old, new) by {worst} bytes of pieces, and {STAGING_BYTES} are for staging. The "
            f"largest shard of one tensor of one state takes {largest} alone. A budget of {enough + STAGING_BYTES} "
            "bytes suffices; or use mode keep, or put the overflow into host memory."
        )
    rounds = _rounds(storage, ledger, order, room)
    return Schedule(
        rounds=tuple(tuple(one for first in granules for one in members[first]) for granules in rounds), mode="tight"
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ledger:
    """The columns of :class:`Storage` for ranks that differ: equal columns once.

    Attributes:
        taken: bytes that a granule of a kind takes, (kinds, columns).
        freed: bytes that it gives back afterwards, (kinds, columns).
        old: bytes held before, per column.
        limit: the larger of the bytes held before and after, per column.
        count: granules of each kind.
    """

    taken: Ints
    freed: Ints
    old: Ints
    limit: Ints
    count: Ints

    @classmethod
    def of(cls, storage: Storage) -> "_Ledger":
        """The ledger of all ranks."""
        kinds = len(storage.taken)
        held = np.stack([storage.old, np.maximum(storage.old, storage.new)])
        columns = np.unique(np.concatenate([storage.taken, storage.freed, held]), axis=1)
        return cls(
            taken=columns[:kinds],
            freed=columns[kinds : 2 * kinds],
            old=columns[-2],
            limit=columns[-1],
            count=np.bincount(storage.kind, minlength=kinds),
        )


def _enough(ledger: _Ledger, room: int) -> int:
    """The first room, ``room`` or a quarter more at a time, in which an order fits."""
    while _order(ledger, room)[1] > room:
        room += -(-room // 4)
    return room


def _order(ledger: _Ledger, room: int) -> tuple[list[int], int]:
    """Kinds in the order of hand-over, and the most bytes of pieces that a rank then holds above its limit.

    Where nothing fits, what exceeds least goes next: the caller reads from the result that the order does not fit.
    """
    left, held = ledger.count.copy(), ledger.old.copy()
    change = ledger.freed - ledger.taken
    idle = ~(ledger.taken.any(axis=1) | ledger.freed.any(axis=1))
    order = np.repeat(np.flatnonzero(idle), left[idle]).tolist()
    left[idle] = 0
    worst = 0
    while left.any():
        kinds = np.flatnonzero(left)
        over = (held + ledger.taken[kinds] - ledger.limit).max(axis=1)
        fits = np.flatnonzero(over <= room)
        if fits.size:
            after = (held - change[kinds[fits]] - ledger.limit) / max(room, 1)
            pick = fits[np.exp(after).sum(axis=1).argmin()]
        else:
            pick = over.argmin()
        kind = int(kinds[pick])
        worst = max(worst, int(over[pick]))
        held -= change[kind]
        left[kind] -= 1
        order.append(kind)
    return order, worst


def _rounds(storage: Storage, ledger: _Ledger, order: list[int], room: int) -> tuple[tuple[Granule, ...], ...]:
    """``order`` as granules, of one kind in catalogue order, as many to a round as fit together."""
    waiting = _by_kind(storage)
    rounds: list[list[Granule]] = []
    held, taken, freed = ledger.old, np.zeros_like(ledger.old), np.zeros_like(ledger.old)
    for kind in order:
        if not rounds or (held + taken + ledger.taken[kind] > ledger.limit + room).any():
            held = held + taken - freed
            taken, freed = np.zeros_like(held), np.zeros_like(held)
            rounds.append([])
        taken, freed = taken + ledger.taken[kind], freed + ledger.freed[kind]
        rounds[-1].append(next(waiting[kind]))
    return tuple(map(tuple, rounds))


def _by_kind(storage: Storage) -> list[Iterator[Granule]]:
    found: list[list[Granule]] = [[] for _ in storage.taken]
    for granule, kind in zip(storage.granules, storage.kind, strict=True):
        found[kind].append(granule)
    return [iter(granules) for granules in found]


def predicted_peak(storage: Storage, schedule: Schedule) -> Ints:
    """The most bytes of pieces that each rank holds at one time; staging comes on top.

    ``keep``: old and new pieces together, adopted ones once. ``tight``: the rounds replayed.
    """
    if schedule.mode == "keep":
        return storage.old + storage.total(storage.taken)
    kind_of = dict(zip(storage.granules, storage.kind, strict=True))
    held = storage.old
    peak = held
    for granules in schedule.rounds:
        kinds = [kind_of[granule] for granule in granules]
        held = held + storage.taken[kinds].sum(axis=0)
        peak = np.maximum(peak, held)
        held = held - storage.freed[kinds].sum(axis=0)
    return peak
