"""A change of layout planned offline: what ``plan``, ``switch --dry-run`` and ``check`` have in common."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dynatrain.app.mistake import MistakeError, all_of
from dynatrain.judge.families import judge_families
from dynatrain.judge.judge import judge_whole
from dynatrain.judge.verdict import Verdict
from dynatrain.layout.layout import Layout
from dynatrain.layout.legality import check
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import print_layout
from dynatrain.plan.build import Adoptable, rank_plan, whole_plan
from dynatrain.plan.by_family import family_plan
from dynatrain.plan.order import chosen_order
from dynatrain.plan.plan import Fetch, Loss, RankPlan, Schedule
from dynatrain.plan.record import PlanRecord, own_layout, record_of
from dynatrain.plan.schedule import STAGING_BYTES, default_budget, keep_schedule, round_bytes_of, tight_schedule
from dynatrain.plan.shelves import reads_of_rest
from dynatrain.plan.storage import Storage, alike, storage
from dynatrain.plan.summary import PlanSummary, summarise
from dynatrain.plan.table import FamilyPlan, WholePlan
from dynatrain.plan.turns import with_turns
from dynatrain.space.decoder import DecoderShape, catalogue
from dynatrain.space.ownership import Ownership, declared
from dynatrain.space.tensor import Catalogue

Result = TypeVar("Result")


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """The result of ``work``, and the seconds that it took."""
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Change:
    """A change of layout.

    Attributes:
        catalogue: the tensors.
        old: the ownership before.
        new: the ownership after.
        members: of a crossing: those over which the layout of ``new`` is; empty where both have the same ranks.
        mode: ``keep`` or ``tight``.
        budget_bytes: bytes above ``max(old, new)`` that a rank may hold in ``tight``, staging included; 0 in ``keep``.
        round_bytes: bytes of whole tensors that travel in one round of ``keep``.
        ranks_per_node: as for the planner.
        storage: bytes of every granule on every rank.
        schedule: the rounds.
        adoptable: which equal boxes may keep their storage.
        holders: after a loss: those over which the layout of ``old`` is; else empty.
        loss: what is left after it; None where nobody is lost.
    """

    catalogue: Catalogue
    old: Ownership
    new: Ownership
    members: tuple[int, ...]
    mode: str
    budget_bytes: int
    round_bytes: int
    ranks_per_node: int | None
    storage: Storage
    schedule: Schedule
    adoptable: Adoptable
    holders: tuple[int, ...] = ()
    loss: Loss | None = None

    @property
    def layouts(self) -> tuple[str, str]:
        """The texts of both layouts."""
        sides = (self.old.layout, self.holders), (self.new.layout, self.members)
        before, after = (print_layout(own_layout(layout, over)) for layout, over in sides)
        return before, after

    def part(self, rank: int) -> RankPlan:
        """What one rank does."""
        return rank_plan(
            self.catalogue,
            self.old,
            self.new,
            rank,
            self.schedule,
            ranks_per_node=self.ranks_per_node,
            adoptable=self.adoptable,
            loss=self.loss,
        )

    def whole(self) -> WholePlan:
        """What all ranks do."""
        return whole_plan(
            self.catalogue,
            self.old,
            self.new,
            self.schedule,
            ranks_per_node=self.ranks_per_node,
            adoptable=self.adoptable,
            loss=self.loss,
        )

    @property
    def fetches(self) -> dict[int, tuple[Fetch, ...]]:
        """What each rank reads from files after a loss, as if those had every tensor in one piece."""
        if self.loss is None or self.loss.files is None:
            return {}
        whole = {
            (index, at): [tuple((0, size) for size in tensor.state_shape(state))]
            for index, tensor in enumerate(self.catalogue)
            for at, state in enumerate(tensor.states)
        }
        sides = self.old, self.new
        return {rank: reads_of_rest(self.catalogue, whole, *sides, rank, self.loss) for rank in self.new.layout.ranks}

    def by_family(self) -> FamilyPlan:
        """What all ranks do, for very many."""
        return family_plan(
            self.catalogue,
            self.old,
            self.new,
            self.schedule,
            ranks_per_node=self.ranks_per_node,
            adoptable=self.adoptable,
        )

    def summary(self, plan: WholePlan) -> PlanSummary:
        """The numbers of :meth:`whole`."""
        return summarise(self.catalogue, self.old, self.new, plan, self.storage, ranks_per_node=self.ranks_per_node)

    @property
    def bytes_moved(self) -> int:
        """Bytes that travel between ranks."""
        return self.summary(self.whole()).moved

    def verdict(self, plan: WholePlan) -> Verdict:
        """What the judge says of :meth:`whole`."""
        room = self.budget_bytes - STAGING_BYTES if self.mode == "tight" else None
        left = {"loss": self.loss, "fetches": self.fetches}
        return judge_whole(self.catalogue, self.old, self.new, plan, budget_bytes=room, **left)

    def verdict_by_family(self, plan: FamilyPlan) -> Verdict:
        """What the judge says of :meth:`by_family`."""
        room = self.budget_bytes - STAGING_BYTES if self.mode == "tight" else None
        return judge_families(self.catalogue, self.old, self.new, plan, budget_bytes=room)

    def record(self, plan: WholePlan, summary: PlanSummary) -> PlanRecord:
        """What a run writes down of :meth:`whole`."""
        return record_of(
            self.catalogue,
            self.old,
            self.new,
            plan,
            summary,
            members=self.members,
            budget_bytes=self.budget_bytes,
            round_bytes=self.round_bytes,
            ranks_per_node=self.ranks_per_node,
            adoptable=self.adoptable,
            holders=self.holders,
            loss=self.loss,
        )


def change(
    tensors: Catalogue,
    old: Ownership,
    new: Ownership,
    *,
    members: tuple[int, ...] = (),
    mode: str,
    budget_bytes: int = 0,
    round_bytes: int = 0,
    ranks_per_node: int | None = None,
    adoptable: Adoptable | None = None,
    holders: tuple[int, ...] = (),
    loss: Loss | None = None,
) -> Change:
    """Plan a change of ownership.

    Args:
        tensors: the catalogue.
        old: the ownership before.
        new: the ownership after.
        members: of a crossing: those over which the layout of ``new`` is.
        mode: ``keep`` or ``tight``.
        budget_bytes: for ``tight``; 0 for the planner's own choice.
        round_bytes: for ``keep``: bytes of whole tensors that travel in one round; 0 for the planner's own choice.
        ranks_per_node: rank ``r`` is on node ``r // ranks_per_node``; None puts all ranks on one node.
        adoptable: which equal boxes may keep their storage; by default those that are padded alike.
        holders: after a loss: those over which the layout of ``old`` is.
        loss: what is left after it.

    Raises:
        PlanError: ``tight`` has no order that fits into the budget.
    """
    adoptable = adoptable or alike(tensors, old, new)
    held = storage(tensors, old, new, adoptable=adoptable)
    round_bytes = round_bytes or round_bytes_of(old.layout.world_size)
    budget = (budget_bytes or default_budget(held)) if mode == "tight" else 0
    rounds = tight_schedule(held, budget) if budget else keep_schedule(tensors, round_bytes, (old, new))
    return Change(
        catalogue=tensors,
        old=old,
        new=new,
        members=members,
        mode=mode,
        budget_bytes=budget,
        round_bytes=round_bytes,
        ranks_per_node=ranks_per_node,
        storage=held,
        # After a loss turns are as they come: whom they would relieve may be lost.
        schedule=rounds if loss else with_turns(tensors, old, new, rounds, ranks_per_node=ranks_per_node),
        adoptable=adoptable,
        holders=holders,
        loss=loss,
    )


def change_of_model(
    shape: DecoderShape,
    layouts: tuple[Layout, Layout],
    *,
    members: tuple[int, ...] = (),
    mode: str,
    dtype: str = "float32",
    optimizer: str = "adamw",
    budget_bytes: int = 0,
    round_bytes: int = 0,
    ranks_per_node: int | None = None,
) -> Change:
    """As :func:`change`, for a model whose parameters are of ``dtype``, with the state of one of our optimizers.

    Of a crossing, ``members[rank]`` is the holder that each rank of the new layout is; where they are empty, rank r is
    holder r before and after.

    Raises:
        MistakeError: a layout is not legal for the model; with everything that is wrong.
        PlanError: as in :func:`change`.
    """
    if ranks_per_node is not None and ranks_per_node < 1:
        raise MistakeError(f"--ranks-per-node is {ranks_per_node}; at least 1.")
    all_of(*(lambda layout=layout: check(layout, shape.limits()) for layout in layouts))
    tensors, layers = catalogue(shape, dtype, optimizer), shape.num_hidden_layers
    before, after = (resolve(layout, layers) for layout in layouts)
    return change(
        tensors,
        declared(tensors, before, layers),
        declared(tensors, after.over(members or after.ranks), layers),
        members=members,
        mode=mode,
        budget_bytes=budget_bytes,
        round_bytes=round_bytes,
        ranks_per_node=ranks_per_node,
    )


def in_chosen_order(written: Change, num_layers: int) -> Change:
    """The same change, to the rank order of the new layout in which most bytes stay where they are.

    Raises:
        PlanError: as in :func:`change`.
    """
    layout = chosen_order(written.catalogue, written.old, written.new, written.ranks_per_node)
    if layout == written.new.layout:
        return written
    return change(
        written.catalogue,
        written.old,
        declared(written.catalogue, layout, num_layers),
        mode=written.mode,
        round_bytes=written.round_bytes,
        ranks_per_node=written.ranks_per_node,
    )


def change_of_record(record: PlanRecord) -> Change:
    """The change that a record is of, planned anew.

    Raises:
        PlanError: as in :func:`change`.
    """
    old, new = record.ownerships()
    return change(
        record.catalogue,
        old,
        new,
        members=record.members,
        mode=record.mode,
        budget_bytes=record.budget_bytes,
        round_bytes=record.round_bytes,
        ranks_per_node=record.ranks_per_node,
        adoptable=lambda index: record.tensors[index].adoptable,
        holders=record.holders,
        loss=record.loss,
    )
