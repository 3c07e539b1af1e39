"""The judge of plans by families (:class:`~dynatrain.plan.table.FamilyPlan`): many thousand ranks in seconds.

What a family's members share is judged once: the box of each row, the pieces at both ends, exactly-once coverage. That
they do lie alike is judged, too, by the judge's own account of every tensor and state. Senders, which differ from
member to member, are each looked at. In ``tight``, ranks that take and give back the same bytes are replayed once.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from dynatrain.judge.coverage import Rows, inside, occupancy, overlapping
from dynatrain.judge.holdings import Flags, Holdings, Ints, Padded, holdings, pads
from dynatrain.judge.judge import unplaced
from dynatrain.judge.rounds import all_granules, incomplete, torn
from dynatrain.judge.verdict import Coverage, Verdict, named, place, shown
from dynatrain.plan.plan import Granule, Schedule
from dynatrain.plan.table import FamilyPlan
from dynatrain.space.box import Box
from dynatrain.space.ownership import Ownership, num_holders
from dynatrain.space.tensor import ITEMSIZE, Catalogue


def judge_families(
    catalogue: Catalogue,
    old: Ownership,
    new: Ownership,
    plan: FamilyPlan,
    *,
    budget_bytes: int | None = None,
    padded: Padded = pads,
) -> Verdict:
    """Judges a plan by families; arguments as in :func:`~dynatrain.judge.judge.judge_all`.

    Its rows have both ends and its rounds are one value, so that no rank can wait for ever, as in
    :func:`~dynatrain.judge.judge.judge_whole`.
    """
    if problems := unplaced(catalogue, old, new):
        return Verdict(problems=problems)
    world = num_holders(old, new)
    if problems := (*_unfit(plan, world), *_strangers(catalogue, plan)):
        return Verdict(problems=problems)
    before, after = (holdings(catalogue, side, world) for side in (old, new))
    if problems := _unlike(catalogue, plan, before, after):
        return Verdict(problems=problems)
    case = _Case(catalogue, plan, before, after)
    covered, uncovered = case.coverage()
    memory = () if plan.schedule.mode != "tight" else case.too_large(plan.schedule, budget_bytes, padded)
    return Verdict(
        coverage=covered,
        problems=(
            *case.misplaced(),
            *case.unkept(),
            *uncovered,
            *incomplete(catalogue, plan.schedule),
            *torn(catalogue, plan.schedule),
            *memory,
        ),
    )


def _unfit(plan: FamilyPlan, world: int) -> tuple[str, ...]:
    """Rows and sources that name what does not exist."""
    rows, most = len(plan.dst), len(plan.sources)
    wrong = (plan.dst < 0) | (plan.dst >= world) | (plan.family < 0) | (plan.family >= len(plan.members))
    wrong |= (plan.ways < 1) | (plan.first < 0) | (plan.first + plan.ways > most) | (plan.turn < 0)
    unknown = [
        f"row {row} of {rows} names a rank, a family or sources that do not exist" for row in np.flatnonzero(wrong)
    ]
    unknown += [
        f"{rank} is no rank that could send" for rank in plan.sources[(plan.sources < 0) | (plan.sources >= world)]
    ]
    if (np.diff(plan.family) < 0).any():
        unknown.append("the rows are not in the order of families")
    return shown(unknown, "row(s) and source(s) of what does not exist")


def _strangers(catalogue: Catalogue, plan: FamilyPlan) -> tuple[str, ...]:
    """Granules that are a member of no family, or of several, and members that are no granule."""
    times = Counter(granule for family in range(len(plan.members)) for granule in _granules(plan, family))
    known = all_granules(catalogue)
    wrong = [
        f"{named(catalogue[tensor], state)} is a member of {times[tensor, state]} families, not of one"
        for tensor, state in known
        if times[tensor, state] != 1
    ]
    wrong += [
        f"granule {granule} is a member of a family and not in the catalogue" for granule in times.keys() - {*known}
    ]
    return shown(wrong, "granule(s) not in exactly one family")


def _unlike(catalogue: Catalogue, plan: FamilyPlan, before: Holdings, after: Holdings) -> tuple[str, ...]:
    """Members that do not lie as the first one of their family does."""
    alike: dict[tuple[int, int, int], bool] = {}

    def differ(side: Holdings, one: int, other: int) -> bool:
        if one == other:
            return False
        key = id(side), one, other
        if key not in alike:
            alike[key] = all(np.array_equal(of[one], of[other]) for of in (side.low, side.high, side.held))
        return not alike[key]

    wrong = []
    for family in range(len(plan.members)):
        (tensor, state), *_ = granules = _granules(plan, family)
        wrong += [
            f"{named(catalogue[t], s)} is planned as {named(catalogue[tensor], state)}, and lies otherwise"
            for t, s in granules
            if any(differ(side, int(side.kind[t, s]), int(side.kind[tensor, state])) for side in (before, after))
        ]
    return shown(wrong, "member(s) that lie otherwise than their family")


def _granules(plan: FamilyPlan, family: int) -> list[Granule]:
    of = plan.members[family]
    return [(tensor, state) for tensor, states in zip(of.tensor.tolist(), of.states, strict=True) for state in states]


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """A plan whose families are what they say, and both sides as the judge sees them."""

    catalogue: Catalogue
    plan: FamilyPlan
    before: Holdings
    after: Holdings

    def _first(self, family: int) -> Granule:
        return int(self.plan.members[family].tensor[0]), self.plan.members[family].states[0][0]

    def _kinds(self, side: Holdings) -> Ints:
        """The kind of each family."""
        return np.array([side.kind[self._first(family)] for family in range(len(self.plan.members))], np.int64)

    def _rows(self) -> Rows:
        """The rows as the moves of each family's first member from its first source."""
        plan = self.plan
        tensor, state = np.array([self._first(i) for i in range(len(plan.members))], np.int64).reshape(-1, 2).T
        at = plan.first + plan.turn % plan.ways
        of = {"tensor": tensor[plan.family], "state": state[plan.family], "src": plan.sources[at]}
        return Rows(**of, low=plan.low, high=plan.high, dst=plan.dst)

    def misplaced(self) -> tuple[str, ...]:
        """Rows that are empty, miss the piece of their target, or leave the piece of any of their senders."""
        plan, rows = self.plan, self._rows()
        empty = (plan.low >= plan.high).any(axis=1)
        outside = ~empty & ~inside(rows, self.after, self._kinds(self.after)[plan.family], plan.dst)
        lacking = ~empty & ~self._founded()
        texts = (
            [(at, plan.dst[at], "is empty") for at in np.flatnonzero(empty)],
            [(at, plan.dst[at], "is not within the piece that the target needs") for at in np.flatnonzero(outside)],
            [(at, plan.sources[plan.first[at]], "is not held by all its sources") for at in np.flatnonzero(lacking)],
        )
        return tuple(
            problem
            for found in texts
            for problem in shown(
                [f"{self._place(int(at), int(rank))} {what} (row to rank {plan.dst[at]})" for at, rank, what in found],
                "row(s) like it",
            )
        )

    def _founded(self) -> Flags:
        """Whether every source of a row holds its box; rows with the same sources share the common part of these."""
        plan, most = self.plan, len(self.plan.sources) + 1
        _, one, where = np.unique(
            (plan.family * most + plan.first) * most + plan.ways, return_index=True, return_inverse=True
        )
        ways = plan.ways[one]
        begins = np.cumsum(ways) - ways
        at = np.repeat(plan.first[one] - begins, ways) + np.arange(ways.sum())
        piece = self._kinds(self.before)[np.repeat(plan.family[one], ways)], plan.sources[at]
        low = np.maximum.reduceat(self.before.low[piece], begins)[where]
        high = np.minimum.reduceat(self.before.high[piece], begins)[where]
        held = np.logical_and.reduceat(self.before.held[piece], begins)[where]
        return np.asarray(held & ((plan.low >= low) & (plan.high <= high)).all(axis=1))

    def _place(self, row: int, rank: int) -> str:
        tensor, state = self._first(int(self.plan.family[row]))
        return place(self.catalogue[tensor], state, self._rows().box(row, self.catalogue), int(rank))

    def unkept(self) -> tuple[str, ...]:
        """Rows that are to be kept, and are not the same, non-empty box before and after, from the target itself."""
        plan = self.plan
        fits = (plan.ways == 1) & (plan.sources[plan.first] == plan.dst)
        for side in (self.before, self.after):
            at = self._kinds(side)[plan.family], plan.dst
            fits &= (plan.low == side.low[at]).all(axis=1) & (plan.high == side.high[at]).all(axis=1) & side.held[at]
        wrong = np.flatnonzero(plan.kept & ~fits)
        return shown(
            [
                f"{self._place(int(at), int(plan.dst[at]))} is kept, but is not the rank's box before and after"
                for at in wrong
            ],
            "row(s) kept without being the same box",
        )

    def coverage(self) -> tuple[dict[str, Coverage], tuple[str, ...]]:
        """How often the rows bring each element of the new pieces, by kind of state: once for all members."""
        plan, kinds = self.plan, self._kinds(self.after)
        expected = self.after.volume()[kinds]
        written = np.zeros_like(expected)
        np.add.at(written, (plan.family, plan.dst), (plan.high - plan.low).clip(min=0).prod(axis=1))
        key = plan.family * expected.shape[1] + plan.dst
        rows = self._rows()
        suspects = (written != expected).ravel()
        suspects[key[~inside(rows, self.after, kinds[plan.family], plan.dst)]] = True
        suspects[key[overlapping(rows, key)]] = True
        twice, missing = np.zeros_like(expected), np.zeros_like(expected)
        order = np.argsort(key, kind="stable")
        problems = []
        for family, rank in zip(*np.unravel_index(np.flatnonzero(suspects), expected.shape), strict=True):
            low, high = (of[kinds[family], rank] for of in (self.after.low, self.after.high))
            high = high if self.after.held[kinds[family], rank] else low
            start, stop = np.searchsorted(key[order], family * expected.shape[1] + np.array([rank, rank + 1]))
            again, lacking = occupancy(rows.take(order[start:stop]), low, high)
            twice[family, rank], missing[family, rank] = again, lacking
            tensor, state = self._first(int(family))
            dims = len(self.catalogue[tensor].state_shape(self.catalogue[tensor].states[state]))
            box: Box = tuple((int(a), int(b)) for a, b in zip(low[:dims], high[:dims], strict=True))
            problems.append(
                f"{place(self.catalogue[tensor], state, box, int(rank))}, as all of its family: {lacking} of "
                f"{expected[family, rank]} elements missing, {again} written twice, "
                f"{written[family, rank]} written in all"
            )
        sums = [column.sum(axis=1).tolist() for column in (expected, written, twice, missing)]
        return self._by_kind(sums), shown(problems, "piece(s) not covered exactly once")

    def _by_kind(self, sums: list[list[int]]) -> dict[str, Coverage]:
        """Elements per family to bytes by name of the state."""
        total: dict[str, Counter[str]] = {}
        for family in range(len(self.plan.members)):
            for tensor, state in _granules(self.plan, family):
                one = self.catalogue[tensor].states[state]
                found = total.setdefault(one.name, Counter())
                for name, column in zip(Coverage.__slots__, sums, strict=True):
                    found[name] += column[family] * ITEMSIZE[one.dtype]
        return {name: Coverage(**found) for name, found in sorted(total.items())}

    def too_large(self, schedule: Schedule, budget_bytes: int | None, padded: Padded) -> tuple[str, ...]:
        """Replays ``tight`` rounds, once for ranks that take and give back alike in every kind of granule."""
        if budget_bytes is None:
            return ("mode tight is judged against a budget, and none was given",)
        (taken, freed, old), number = self._lots(padded)
        times = np.bincount([*number.values()], minlength=len(old))
        held = times @ old
        lots = len(taken)
        columns, rank = np.unique(np.concatenate([taken, freed, held[None]]), axis=1, return_index=True)
        taken, freed, held = columns[:lots], columns[lots:-1], columns[-1]
        limit = np.maximum(held, held + times @ (taken - freed)) + budget_bytes
        problems = []
        for turn, granules in enumerate(schedule.rounds):
            rows = [number[granule] for granule in granules if granule in number]
            held = held + taken[rows].sum(axis=0)
            problems += [
                f"rank {rank[at]} holds {held[at]} bytes in round {turn}, {held[at] - limit[at]} above its limit "
                f"max(old, new) + {budget_bytes} = {limit[at]}"
                for at in np.flatnonzero(held > limit)
            ]
            held = held - freed[rows].sum(axis=0)
        return shown(problems, "time(s) that ranks hold too much")

    def _lots(self, padded: Padded) -> tuple[tuple[Ints, Ints, Ints], dict[Granule, int]]:
        """Bytes that each granule of a lot takes, gives back, and has before, on each rank; the lot of each granule."""
        plan = self.plan
        kept = np.zeros((len(plan.members), self.before.held.shape[1]), np.bool_)
        kept[plan.family[plan.kept], plan.dst[plan.kept]] = True
        lots: dict[tuple[object, ...], int] = {}
        number: dict[Granule, int] = {}
        columns: list[tuple[Ints, Ints, Ints]] = []
        sides = self.after, self.before
        stored = {way: tuple(side.stored(padded=way) for side in sides) for way in (True, False)}
        for family, of in enumerate(plan.members):
            for adopts, tensor, states in zip(of.adopts.tolist(), of.tensor.tolist(), of.states, strict=True):
                for state in states:
                    one = self.catalogue[tensor].states[state]
                    kinds = tuple(int(side.kind[tensor, state]) for side in sides)
                    pads, itemsize = padded(self.catalogue[tensor], one), ITEMSIZE[one.dtype]
                    number[tensor, state] = lots.setdefault((family, kinds, adopts, pads, itemsize), len(lots))
                    if len(lots) > len(columns):
                        new, old = (side[kind] * itemsize for side, kind in zip(stored[pads], kinds, strict=True))
                        adopted = kept[family] & adopts
                        columns.append((np.where(adopted, 0, new), np.where(adopted, 0, old), old))
        taken, freed, whole = (np.stack(column) for column in zip(*columns, strict=True))
        return (taken, freed, whole), number
