"""The plan of one switch as one rank needs it: its own part, judged, with the numbers that the certificate tells."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dynatrain.judge.judge import judge_rank, judge_whole
from dynatrain.judge.verdict import Coverage
from dynatrain.layout.layout import Layout
from dynatrain.observe.modes import mode_problem
from dynatrain.plan.build import rank_plan, whole_plan
from dynatrain.plan.errors import PlanError
from dynatrain.plan.hashes import received_hash, sent_hash
from dynatrain.plan.plan import Fetch, Loss, RankPlan, Schedule
from dynatrain.plan.record import PlanRecord, record_of
from dynatrain.plan.schedule import (
    STAGING_BYTES,
    default_budget,
    keep_schedule,
    predicted_peak,
    round_bytes_of,
    tight_schedule,
)
from dynatrain.plan.storage import Storage, alike, storage
from dynatrain.plan.summary import PlanSummary, summarise
from dynatrain.plan.turns import with_turns
from dynatrain.space.ownership import Ownership
from dynatrain.train.agreement import SwitchAbortedError, exchange, objection_of
from dynatrain.train.argument import ArgumentError
from dynatrain.train.party import Party
from dynatrain.train.world import World

FITS = 0.8
"""Part of the free memory that ``auto`` may fill in ``keep``: the next step needs the rest."""

MODULUS = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Bytes that a rank may take.

    Attributes:
        nbytes: that its machine, or device, has.
        promised: that the promise of its process leaves it; None where it shares none.
    """

    nbytes: int
    promised: int | None = None

    def beyond(self, needed: int) -> str:
        """Why ``needed`` more cannot be had under the promise; empty where they can."""
        if self.promised is None or needed <= self.promised:
            return ""
        return f"needs {needed} bytes more, and the promise of its process leaves {self.promised}"


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A judged plan.

    Attributes:
        part: this rank's moves and the rounds.
        plan_hash: agreed by senders and receivers of all ranks.
        peak: predicted bytes of pieces by rank.
        coverage: by kind of state, over all ranks; where the whole plan was drawn, empty elsewhere.
        summary: bytes by rank and the floor; likewise, None elsewhere.
        record: what is written down of it; likewise, None elsewhere.
        host: predicted bytes of pieces in host memory by rank, where one end of the switch lies there.
    """

    part: RankPlan
    plan_hash: int
    peak: tuple[int, ...]
    coverage: Mapping[str, Coverage]
    summary: PlanSummary | None
    record: PlanRecord | None
    host: tuple[int, ...] = ()


def draw(
    party: Party,
    mode: str,
    old: World,
    new: World,
    topic: str,
    *,
    members: tuple[int, ...] = (),
    whole: bool,
    loss: Loss | None = None,
    reads: Callable[[int], tuple[Fetch, ...]] | None = None,
) -> Blueprint:
    """Plan the switch, judge it, and agree with all ranks that both ends of every move are planned alike.

    Args:
        party: this rank.
        mode: ``keep``, ``tight`` or ``auto``.
        old: the world that trains.
        new: the world to come.
        topic: of the questions; never used before.
        members: of a crossing, the holder of each new rank.
        whole: whether this rank is to know the whole plan: rank 0 at least.
        loss: of old ranks; None where all are there.
        reads: what a rank reads from files then; None where nothing is read.

    Raises:
        SwitchAbortedError: no order of hand-overs fits, the judge refuses, or the ranks' plans differ.
    """
    promise = party.memory.promise
    room = [free_bytes(party.device), promise.room if promise else None]
    told = exchange(party.board, f"{topic}/memory", party.rank, payload=room, timeout=party.deadline).in_order()
    free = [Free(nbytes=nbytes, promised=promised) for nbytes, promised in told]
    blueprint, hashes, objection = None, None, None
    schedule, budget = _agree_on_rounds(party, mode, old, new, free, f"{topic}/rounds", turns=loss is None)
    try:
        blueprint, hashes = _draw_own(party, old, new, schedule, budget, members if whole else None, loss, reads)
    except Exception as problem:  # noqa: BLE001 - told to all ranks
        objection = objection_of(problem)
    told = exchange(
        party.board, topic, party.rank, payload=hashes, objection=objection, timeout=party.deadline
    ).in_order()
    sent, received = (sum(column) % MODULUS for column in zip(*told, strict=True))
    if sent != received:
        raise SwitchAbortedError(f"senders planned {sent:016x}, receivers {received:016x}: the ranks' plans differ")
    assert blueprint is not None
    return replace(blueprint, plan_hash=sent)


def _agree_on_rounds(
    party: Party, mode: str, old: World, new: World, free: list[Free], topic: str, *, turns: bool
) -> tuple[Schedule, int | None]:
    """Rank 0's choice of mode, rounds, turns and budget, on every rank.

    The order of hand-overs compares floating-point scores, whose last bits differ between processors: computed on every
    rank, it could be two orders. Without ``turns`` these are as they come: after a loss, whom they would relieve may be
    lost.

    Raises:
        SwitchAbortedError: no order of hand-overs fits.
    """
    chosen, objection = None, None
    if party.rank == 0:
        try:
            schedule, budget = choose(party, mode, old, new, _table(old, new), free)
            assert old.ownership is not None
            assert new.ownership is not None
            sides = old.ownership, new.ownership
            if turns:
                schedule = with_turns(old.catalogue, *sides, schedule, ranks_per_node=party.ranks_per_node)
            chosen = [schedule.mode, schedule.rounds, schedule.turns, budget]
        except Exception as problem:  # noqa: BLE001 - told to all ranks
            objection = objection_of(problem)
    told = exchange(
        party.board, topic, party.rank, payload=chosen, objection=objection, timeout=party.deadline
    ).in_order()
    mode, rounds, chosen_turns, budget = told[0]
    rounds = tuple(tuple((tensor, state) for tensor, state in granules) for granules in rounds)
    return Schedule(rounds=rounds, mode=mode, turns=tuple(chosen_turns)), budget


def _table(old: World, new: World) -> Storage:
    assert old.ownership is not None
    assert new.ownership is not None
    return storage(old.catalogue, old.ownership, new.ownership, adoptable=may_adopt(old, new.ownership))


def _draw_own(
    party: Party,
    old: World,
    new: World,
    schedule: Schedule,
    budget: int | None,
    members: tuple[int, ...] | None,
    loss: Loss | None,
    reads: Callable[[int], tuple[Fetch, ...]] | None,
) -> tuple[Blueprint, list[int]]:
    """This rank's blueprint, and its part of the hashes of all sends and all receives.

    The whole plan is drawn where ``members`` are given: see :func:`draw`.

    Raises:
        PlanError: the judge refuses.
    """
    assert old.ownership is not None
    assert new.ownership is not None
    catalogue, before, after = old.catalogue, old.ownership, new.ownership
    adoptable = may_adopt(old, after)
    table = _table(old, new)
    nodes = None if loss else party.ranks_per_node
    part = rank_plan(
        catalogue, before, after, party.rank, schedule, ranks_per_node=nodes, adoptable=adoptable, loss=loss
    )
    fetches = (
        {rank: reads(rank) for rank in (after.layout.ranks if members is not None else [party.rank])} if reads else {}
    )
    own_fetches = {party.rank: fetches[party.rank]} if party.rank in fetches else {}
    verdict = judge_rank(catalogue, before, after, part, budget_bytes=budget, loss=loss, fetches=own_fetches)
    problems, coverage, summary, record = list(verdict.problems), verdict.coverage, None, None
    if members is not None:
        every = whole_plan(catalogue, before, after, schedule, ranks_per_node=nodes, adoptable=adoptable, loss=loss)
        all_ranks = judge_whole(catalogue, before, after, every, budget_bytes=budget, loss=loss, fetches=fetches)
        problems += all_ranks.problems
        coverage = all_ranks.coverage
        summary = summarise(catalogue, before, after, every, table, ranks_per_node=nodes)
        record = record_of(
            catalogue,
            before,
            after,
            every,
            summary,
            members=members,
            budget_bytes=0 if budget is None else budget + STAGING_BYTES,
            round_bytes=round_bytes_of(party.world_size, party.round_bytes),
            ranks_per_node=nodes,
            adoptable=adoptable,
            holders=_holders(old.layout, before.layout) if loss else (),
            loss=loss,
        )
    if problems:
        raise PlanError("the judge refuses the plan: " + "; ".join(problems))
    own = sent_hash(catalogue, part)
    blueprint = Blueprint(part, own, tuple(predicted_peak(table, schedule).tolist()), coverage, summary, record)
    return blueprint, [own, received_hash(catalogue, part)]


def _holders(layout: Layout, over: Layout) -> tuple[int, ...]:
    """The holder that each rank of ``layout`` is in ``over``, the same layout over holders."""
    found = {layout.rank_of(number): over.rank_of(number) for number in range(layout.world_size)}
    return tuple(found[rank] for rank in range(layout.world_size))


def may_adopt(old: World, after: Ownership) -> Callable[[int], bool]:
    """Whether an unchanged piece of a tensor may keep its storage.

    Not where padding differs; not what is a part of its storage, whose neighbours may go elsewhere; and not what the
    first step in the new layout may write before the commit, since the old storage must not see it: buffers, and
    tensors of which a registered object holds state.
    """
    assert old.ownership is not None
    equal = alike(old.catalogue, old.ownership, after)

    def written(index: int) -> bool:
        kinds = [state.name for state in old.catalogue[index].states]
        return "buffer" in kinds or any(kind in old.forms for kind in kinds)

    return lambda index: equal(index) and not written(index) and not after.placements[old.catalogue[index].name].spans


def check_mode(mode: str) -> None:
    """Refuse what is no mode.

    Raises:
        ArgumentError: with the nearest one.
    """
    if problem := mode_problem(mode):
        raise ArgumentError(problem)


def choose(
    party: Party, mode: str, old: World, new: World, table: Storage, free: list[Free]
) -> tuple[Schedule, int | None]:
    """The rounds, and in ``tight`` the room for pieces; left to choose, ``keep`` where there is the memory for it.

    Args:
        party: this rank.
        mode: ``keep``, ``tight`` or ``auto``.
        old: the world that trains.
        new: the world to come.
        table: bytes of every granule on every rank.
        free: what each rank sees of free memory.

    Returns:
        The schedule, and in ``tight`` the bytes above ``max(old, new)`` that pieces may take: the budget less staging.

    Raises:
        PlanError: no order of hand-overs fits, or the mode needs more than was promised.
        ArgumentError: there is no such mode.
    """
    check_mode(mode)
    assert old.ownership is not None
    assert new.ownership is not None
    round_bytes = round_bytes_of(party.world_size, party.round_bytes)
    keep = keep_schedule(old.catalogue, round_bytes, (old.ownership, new.ownership))
    extra = (predicted_peak(table, keep) - table.old).tolist()
    sharing = party.ranks_per_node or party.world_size
    fits = all(
        extra[rank] * sharing < FITS * free[rank].nbytes and not free[rank].beyond(extra[rank])
        for rank in party.everyone
    )
    if mode == "keep" or (mode == "auto" and fits):
        _require_promised(mode, extra, free)
        return keep, None
    budget = party.budget or default_budget(table)
    tight = tight_schedule(table, budget)
    _require_promised("tight", (predicted_peak(table, tight) - table.old + STAGING_BYTES).tolist(), free)
    return tight, budget - STAGING_BYTES


def _require_promised(mode: str, extra: list[int], free: list[Free]) -> None:
    """Refuse a switch for which the ranks' promises leave no room.

    Raises:
        PlanError: which ranks need how much.
    """
    if problems := [f"rank {rank} {why}" for rank, one in enumerate(free) if (why := one.beyond(extra[rank]))]:
        nearest = "mode tight" if mode == "keep" else "a job of the process that is parked meanwhile"
        raise PlanError(f"mode {mode}: {'; '.join(problems)}. Nearest: {nearest}, or a larger promise")


def free_bytes(device: torch.device) -> int:
    """Memory that new state could take: of the device, or of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise PlanError("/proc/meminfo does not say how much memory is available; name the mode: keep or tight")
