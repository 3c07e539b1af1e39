"""What a good engineer writes by hand for one switch: who sends which box to whom, new tensors, and isend and irecv.

No rounds, no packing of several tensors into a message, no digests, no judge, and no way back. Shares boxes with our
plans, and neither their choice of sources nor what carries them out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dynatrain.space.box import Box, intersect, volume, within
from dynatrain.space.ownership import Ownership
from dynatrain.space.tensor import Catalogue, State, Tensor
from dynatrain.train.baselines import Held
from dynatrain.train.torch_private import local_tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """What one rank gives another, or has itself: slices of the old shard of ``frm`` and of the new one of ``to``."""

    frm: int
    to: int
    taken: tuple[slice, ...]
    put: tuple[slice, ...]


Plan = Sequence[tuple[str, Sequence[tuple[str, Sequence[Cut]]]]]
"""``[(tensor, [(state, cuts)])]``, in one order on all ranks."""


def plan_by_hand(catalogue: Catalogue, old: Ownership, new: Ownership) -> Plan:
    """Every old shard cut by every new one, of every tensor and state; each rank works it all out."""
    return [
        (tensor.name, [(state.name, _cuts(tensor, state, old, new)) for state in tensor.states]) for tensor in catalogue
    ]


def _cuts(tensor: Tensor, state: State, old: Ownership, new: Ownership) -> list[Cut]:
    holders: dict[Box, list[int]] = {}
    for rank in old.layout.ranks:
        if box := _box(old, tensor, state, rank):
            holders.setdefault(box[0], []).append(rank)
    found = []
    for to in new.layout.ranks:
        wanted = _box(new, tensor, state, to)
        filled = 0
        for box, ranks in holders.items():
            if wanted and (common := intersect(box, wanted[0])) is not None:
                frm = to if to in ranks else ranks[to % len(ranks)]
                found.append(Cut(frm, to, within(common, box), within(common, wanted[0])))
                filled += volume(common)
        # New memory may hold what lay there before, so a hole could look filled.
        assert filled == sum(map(volume, wanted)), f"{tensor.name} {state.name}: rank {to} gets {filled} elements"
    return found


def _box(owner: Ownership, tensor: Tensor, state: State, rank: int) -> tuple[Box, ...]:
    """The box, or nothing; of a scalar the box is ``()`` itself."""
    box = owner.state_box(tensor, state, rank)
    return () if box is None else (box,)


def carry_out(plan: Plan, source: Held, target: Held) -> None:
    """Fill this rank's ``target`` from all ranks' ``source``, tensor by tensor. Collective over the default group."""
    for name, states in plan:
        batch = _Batch()
        for state, cuts in states:
            for cut in cuts:
                batch.add(cut, source.get((name, state)), target.get((name, state)))
        batch.run()


@dataclass(slots=True)
class _Batch:
    """What one rank has to do for one tensor. Gloo sends and receives what is contiguous; the rest is copied."""

    sends: list[dist.P2POp] = field(default_factory=list)
    receives: list[dist.P2POp] = field(default_factory=list)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    landed: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(self, cut: Cut, source: torch.Tensor | None, target: torch.Tensor | None) -> None:
        """Add what this rank has to do for ``cut``."""
        rank = dist.get_rank()
        taken = local_tensor(source)[cut.taken] if source is not None and rank == cut.frm else None
        there = local_tensor(target)[cut.put] if target is not None and rank == cut.to else None
        if taken is not None and there is not None:
            self.kept.append((there, taken))
        elif taken is not None:
            self.sends.append(dist.P2POp(dist.isend, taken.contiguous(), cut.to))
        elif there is not None:
            landing = there if there.is_contiguous() else torch.empty(there.shape, dtype=there.dtype)
            self.receives.append(dist.P2POp(dist.irecv, landing, cut.frm))
            self.landed += [(there, landing)] if landing is not there else []

    def run(self) -> None:
        """Do it: copies beside what travels."""
        ops = [*self.receives, *self.sends]
        works = dist.batch_isend_irecv(ops) if ops else []
        for there, value in self.kept:
            there.copy_(value)
        for work in works:
            work.wait()
        for there, value in self.landed:
            there.copy_(value)
