"""The plan by families is the plan rank by rank, move for move; the judge of families finds what is planted in one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.plans.cases import LAYERS, catalogues, layout, layouts, numbered, small

from dynatrain.judge.families import judge_families
from dynatrain.judge.judge import judge_whole
from dynatrain.plan.build import rank_plan, whole_plan
from dynatrain.plan.by_family import family_plan
from dynatrain.plan.hashes import plan_hash
from dynatrain.plan.schedule import STAGING_BYTES, default_budget, keep_schedule, tight_schedule
from dynatrain.plan.sources import families
from dynatrain.plan.storage import alike, storage
from dynatrain.plan.table import table
from dynatrain.space.ownership import declared, num_holders


def moves_of(plan):
    """Every move, ``(tensor, states, low, high, src, dst)``, and every adopted piece, ``(tensor, states, rank)``."""
    if not hasattr(plan, "members"):
        table = plan.moves
        states = [table.groups[group] for group in table.group.tolist()]
        rows = zip(table.tensor, states, table.low, table.high, table.src, table.dst, strict=True)
        kept = [table.groups[group] for group in plan.adopted_group.tolist()]
        return told(rows), sorted(zip(plan.adopted_tensor.tolist(), kept, plan.adopted_rank.tolist(), strict=True))
    rows, adopted = [], []
    for family, members in enumerate(plan.members):
        of = plan.rows(family)
        sources = plan.source(of, np.arange(len(members.tensor)))
        for row in range(of.start, of.stop):
            for number, (tensor, states) in enumerate(zip(members.tensor.tolist(), members.states, strict=True)):
                if plan.kept[row] and members.adopts[number]:
                    adopted.append((tensor, states, int(plan.dst[row])))
                else:
                    src = sources[row - of.start, number]
                    rows.append((tensor, states, plan.low[row], plan.high[row], src, plan.dst[row]))
    return told(rows), sorted(adopted)


def told(rows):
    return sorted((int(t), s, tuple(low), tuple(high), int(src), int(dst)) for t, s, low, high, src, dst in rows)


@st.composite
def changes(draw):
    catalogue = draw(catalogues())
    old, new = (declared(catalogue, draw(one), LAYERS) for one in (layouts(), numbered()))
    per_node, vetoed = draw(st.sampled_from([None, 1, 2, 3])), draw(st.sampled_from([1, 2, 100]))
    return catalogue, old, new, {"ranks_per_node": per_node, "adoptable": lambda tensor: bool((tensor + 1) % vetoed)}


few = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@few
@given(changes(), st.booleans())
def test_a_plan_by_families_has_the_moves_of_the_plan_rank_by_rank(change, turns):
    catalogue, old, new, how = change
    schedule = replace(keep_schedule(catalogue, 100), turns=tuple(range(len(families(catalogue, old, new)))) * turns)
    one, other = (build(catalogue, old, new, schedule, **how) for build in (whole_plan, family_plan))
    parts = [rank_plan(catalogue, old, new, rank, schedule, **how) for rank in range(num_holders(old, new))]

    assert moves_of(one) == moves_of(other)
    for ends in (("receives", "relays"), ("sends", "relays")):
        moves = table(move for part in parts for end in ends for move in getattr(part, end))
        assert plan_hash(catalogue, moves) == plan_hash(catalogue, one.moves)


@few
@given(changes(), st.booleans())
def test_the_judge_of_families_says_what_the_judge_of_moves_says(change, tight):
    catalogue, old, new, how = change
    adoptable, budget, schedule = alike(catalogue, old, new), None, keep_schedule(catalogue, 100)
    if tight:
        stored = storage(catalogue, old, new, adoptable=adoptable)
        budget = default_budget(stored) - STAGING_BYTES
        schedule = tight_schedule(stored, budget + STAGING_BYTES)
    how |= {"adoptable": adoptable}
    one, other = (
        judge(catalogue, old, new, build(catalogue, old, new, schedule, **how), budget_bytes=budget)
        for judge, build in ((judge_whole, whole_plan), (judge_families, family_plan))
    )

    assert one == other
    assert other.ok


CATALOGUE = small()
OLD, NEW = (declared(CATALOGUE, one, LAYERS) for one in (layout(dp=2, fsdp=2, tp=2), layout(pp=2, fsdp=4)))
SOUND = family_plan(CATALOGUE, OLD, NEW, keep_schedule(CATALOGUE, 100))


def without(row):
    names = ("family", "low", "high", "dst", "first", "ways", "turn", "kept", "holders_first", "holders")
    return replace(SOUND, **{name: np.delete(getattr(SOUND, name), row, axis=0) for name in names})


def changed(name, row, by):
    column = getattr(SOUND, name).copy()
    column[row] = column[row] + by
    return replace(SOUND, **{name: column})


def moved_row():
    """A row of a matrix that is sent, and cuts it."""
    return next(r for r in range(len(SOUND.dst)) if SOUND.ways[r] > 1 and SOUND.high[r, 1] > 2)


def members(change):
    one, *others = SOUND.members
    return replace(SOUND, members=(change(one), *others))


def other_source():
    row = moved_row()
    lacking = next(
        r for r in range(8) if OLD.box(CATALOGUE[0], r) != OLD.box(CATALOGUE[0], SOUND.sources[SOUND.first[row]])
    )
    sources = SOUND.sources.copy()
    sources[SOUND.first[row] + SOUND.ways[row] - 1] = lacking
    return replace(SOUND, sources=sources)


def same_box_twice():
    """A row that brings what another one brings to the same piece, of as many elements as its own."""
    key = list(zip(SOUND.family.tolist(), SOUND.dst.tolist(), SOUND.volume().tolist(), strict=True))
    row = next(row for row, one in enumerate(key) if key.count(one) > 1)
    other = key.index(key[row], row + 1)
    low, high = SOUND.low.copy(), SOUND.high.copy()
    low[row], high[row] = low[other], high[other]
    return replace(SOUND, low=low, high=high)


FAULTS = {
    "a row brings what another does": (same_box_twice, "written twice"),
    "a row is missing": (lambda: without(moved_row()), "elements missing"),
    "a row is too long": (
        lambda: changed("high", moved_row(), [1, 0]),
        "is not within the piece that the target needs",
    ),
    "a row is empty": (lambda: changed("high", moved_row(), [-20, 0]), "is empty"),
    "a row goes to another rank": (lambda: changed("dst", moved_row(), 1), "written twice"),
    "a source has it not": (other_source, "is not held by all its sources"),
    "a rank that does not exist": (lambda: changed("dst", moved_row(), 8), "do not exist"),
    "sources that do not exist": (lambda: changed("first", moved_row(), 10**6), "do not exist"),
    "a moved row is kept": (lambda: changed("kept", moved_row(), True), "is kept, but is not the rank's box"),
    "a tensor is in no family": (
        lambda: members(lambda m: replace(m, tensor=m.tensor[:0], states=(), adopts=m.adopts[:0])),
        "is a member of 0 families",
    ),
    "a tensor is in two": (lambda: members(lambda m: replace(m, tensor=m.tensor + 1)), "is a member of 2 families"),
    "a state lies otherwise": (
        lambda: replace(SOUND, members=swapped()),
        "lies otherwise",
    ),
    "a granule is in no round": (
        lambda: replace(SOUND, schedule=replace(SOUND.schedule, rounds=SOUND.schedule.rounds[1:])),
        "is in 0 rounds",
    ),
    "tight without a budget": (
        lambda: replace(SOUND, schedule=replace(SOUND.schedule, mode="tight")),
        "none was given",
    ),
}


def swapped():
    """The first members of two families with several have changed places."""
    one, other = [i for i, of in enumerate(SOUND.members) if len(of.tensor) > 1][:2]
    found = list(SOUND.members)
    for here, there in ((one, other), (other, one)):
        tensor, theirs = SOUND.members[here].tensor.copy(), SOUND.members[there]
        tensor[-1] = theirs.tensor[-1]
        found[here] = replace(SOUND.members[here], tensor=tensor, states=(*found[here].states[:-1], theirs.states[-1]))
    return tuple(found)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    plant, said = FAULTS[fault]
    assert judge_families(CATALOGUE, OLD, NEW, SOUND).ok
    problems = judge_families(CATALOGUE, OLD, NEW, plant()).problems

    assert any(said in problem for problem in problems), problems


def test_a_budget_that_is_too_small_is_found():
    stored = storage(CATALOGUE, OLD, NEW)
    schedule = tight_schedule(stored, default_budget(stored))
    enough = default_budget(stored) - STAGING_BYTES
    plan = replace(SOUND, schedule=schedule)
    said = [judge_families(CATALOGUE, OLD, NEW, plan, budget_bytes=budget) for budget in (enough, 1)]

    assert said[0].ok
    assert "above its limit" in said[1].problems[0]
