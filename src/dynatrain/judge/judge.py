"""The judge of plans: may this one be carried out?

It knows the plan's format and the space, and derives nothing the way the builder does. Where the builder divides, the
judge asks each rank's box of the ownership; where the builder fetches cut by cut, the judge counts elements. A plan
that brings every element of every new piece exactly once, from a rank that holds it, with both ends agreed on every
move and round, can neither lose nor mix up state.
"""

from collections.abc import Sequence

import numpy as np

from dynatrain.judge.coverage import Rows, adopted_rows, by_state, coverage, misplaced, unadoptable
from dynatrain.judge.holdings import Flags, Ints, Padded, holdings, pads
from dynatrain.judge.loss import Fetched, fetched_rows, misread, unfounded, unlived
from dynatrain.judge.rounds import incomplete, stuck, too_large, torn, unmatched
from dynatrain.judge.verdict import Verdict, shown
from dynatrain.plan.plan import Loss, RankPlan, Schedule
from dynatrain.plan.table import MoveTable, WholePlan, table
from dynatrain.space.ownership import Ownership, num_holders
from dynatrain.space.tensor import Catalogue

NOTHING_READ: Fetched = {}


def judge_rank(
    catalogue: Catalogue,
    old: Ownership,
    new: Ownership,
    part: RankPlan,
    *,
    budget_bytes: int | None = None,
    padded: Padded = pads,
    loss: Loss | None = None,
    fetches: Fetched = NOTHING_READ,
) -> Verdict:
    """Judges one rank's part alone; coverage counts that rank's new pieces.

    That other ranks send what this one receives is seen only by :func:`judge_all`, or by comparing hashes.

    Args:
        catalogue: the tensors.
        old: the ownership that has the state.
        new: the ownership that needs it.
        part: what to judge.
        budget_bytes: bytes above ``max(old, new)`` that a rank may hold; needed in ``tight``.
        padded: which states have padded storage.
        loss: of ranks of ``old``: moves are held against what is left. None where all are there.
        fetches: what ranks read from files after a loss, by rank. That the files have it is for
            :func:`~dynatrain.judge.shelves.judge_fetches`.
    """
    if homeless := unplaced(catalogue, old, new):
        return Verdict(problems=homeless)
    case = _Case(catalogue, (old, new), np.array([part.rank]), budget_bytes, padded, loss)
    outgoing, unknown = case.rows(table(part.sends))
    verdict = case.judge(table((*part.receives, *part.relays)), _adopted([part]), part.schedule, fetches)
    return Verdict(
        coverage=verdict.coverage,
        problems=(*_strangers(part), *unknown, *case.misplaced(outgoing), *verdict.problems),
    )


def judge_all(
    catalogue: Catalogue,
    old: Ownership,
    new: Ownership,
    parts: Sequence[RankPlan],
    *,
    budget_bytes: int | None = None,
    padded: Padded = pads,
    loss: Loss | None = None,
    fetches: Fetched = NOTHING_READ,
) -> Verdict:
    """Judges the parts of all ranks together, also that both ends of each move agree and that no rank waits for ever.

    Args:
        catalogue: the tensors.
        old: the ownership that has the state.
        new: the ownership that needs it.
        parts: one per rank of either world, by rank; of whoever is in neither, an empty one.
        budget_bytes: bytes above ``max(old, new)`` that a rank may hold; needed in ``tight``.
        padded: which states have padded storage.
        loss: of ranks of ``old``: moves are held against what is left. None where all are there.
        fetches: what ranks read from files after a loss, by rank. That the files have it is for
            :func:`~dynatrain.judge.shelves.judge_fetches`.
    """
    world = num_holders(old, new)
    if (seen := [part.rank for part in parts]) != list(range(world)):
        return Verdict(problems=(f"parts of ranks {seen} were given; one of each of 0 .. {world - 1} is needed",))
    if homeless := unplaced(catalogue, old, new):
        return Verdict(problems=homeless)
    case = _Case(catalogue, (old, new), np.arange(world), budget_bytes, padded, loss)
    moves = table(move for part in parts for move in (*part.receives, *part.relays))
    verdict = case.judge(moves, _adopted(parts), parts[0].schedule, fetches)
    strangers = (problem for part in parts for problem in _strangers(part))
    return Verdict(
        coverage=verdict.coverage,
        problems=(*strangers, *verdict.problems, *unmatched(catalogue, parts), *stuck(catalogue, parts)),
    )


def judge_whole(
    catalogue: Catalogue,
    old: Ownership,
    new: Ownership,
    plan: WholePlan,
    *,
    budget_bytes: int | None = None,
    padded: Padded = pads,
    loss: Loss | None = None,
    fetches: Fetched = NOTHING_READ,
) -> Verdict:
    """Judges a plan in columns, for large worlds; arguments as in :func:`judge_all`.

    Its moves have both ends in one row and its rounds are one value, so there is no second end that could disagree:
    each round's receives have their sends in the same round, and no rank can wait for ever.
    """
    if homeless := unplaced(catalogue, old, new):
        return Verdict(problems=homeless)
    case = _Case(catalogue, (old, new), np.arange(num_holders(old, new)), budget_bytes, padded, loss)
    groups = plan.moves.groups
    states = [(i, state) for i, group in enumerate(plan.adopted_group.tolist()) for state in groups[group]]
    row, state = np.array(states, np.int64).reshape(-1, 2).T
    return case.judge(plan.moves, (plan.adopted_tensor[row], state, plan.adopted_rank[row]), plan.schedule, fetches)


class _Case:
    """What is fixed while a plan is judged: the tensors, both sides, and the ranks whose new pieces count."""

    def __init__(
        self,
        catalogue: Catalogue,
        sides: tuple[Ownership, Ownership],
        ranks: Ints,
        budget_bytes: int | None,
        padded: Padded,
        loss: Loss | None,
    ) -> None:
        self.catalogue = catalogue
        self.world = num_holders(*sides)
        self.old, self.new = (holdings(catalogue, side, self.world) for side in sides)
        self.ranks = ranks
        self.budget_bytes = budget_bytes
        self.padded = padded
        self.loss = loss
        self._states = np.array([len(tensor.states) for tensor in catalogue], np.int64)

    def rows(self, moves: MoveTable) -> tuple[Rows, tuple[str, ...]]:
        """``moves``, one state a row, without those that name no tensor, state or rank; and these as problems."""
        rows = by_state(moves, self.old.low.shape[2])
        known = self._known(rows.tensor, rows.state, rows.src) & self._known(rows.tensor, rows.state, rows.dst)
        unknown = rows.take(~known)
        problems = [
            f"a move of state {state} of tensor {tensor} from rank {src} to rank {dst} names what does not exist"
            for tensor, state, src, dst in zip(unknown.tensor, unknown.state, unknown.src, unknown.dst, strict=True)
        ]
        return rows.take(known), shown(problems, "move(s) of what does not exist")

    def _known(self, tensor: Ints, state: Ints, rank: Ints) -> Flags:
        exists = (tensor >= 0) & (tensor < len(self.catalogue)) & (rank >= 0) & (rank < self.world) & (state >= 0)
        return np.asarray(exists & (state < self._states[np.where(exists, tensor, 0)]))

    def misplaced(self, moves: Rows) -> tuple[str, ...]:
        """Moves out of what their source has not, or into what their target needs not."""
        if self.loss is None:
            return misplaced(self.catalogue, self.old, self.new, moves)
        left = unfounded(self.catalogue, self.old, moves, self.loss)
        return (*misplaced(self.catalogue, None, self.new, moves), *left)

    def judge(
        self, moves: MoveTable, adopted: tuple[Ints, Ints, Ints], schedule: Schedule, fetches: Fetched
    ) -> Verdict:
        """Judges moves into the pieces of ``ranks``, adopted ``(tensor, state, rank)``, files and the rounds."""
        arriving, unknown = self.rows(moves)
        known = self._known(*adopted)
        problems = [
            f"rank {rank} adopts state {state} of tensor {tensor}, which does not exist"
            for tensor, state, rank in zip(*(column[~known] for column in adopted), strict=True)
        ]
        tensor, state, rank = (column[known] for column in adopted)
        kept = adopted_rows(self.new, tensor, state, rank)
        read = fetched_rows(fetches, self.old.low.shape[2])
        covered, uncovered = coverage(self.catalogue, self.new, arriving.joined(kept).joined(read), self.ranks)
        return Verdict(
            coverage=covered,
            problems=(
                *unknown,
                *shown(problems, "adopted piece(s) of what does not exist"),
                *self.misplaced(arriving),
                *misread(fetches, self.loss),
                *unadoptable(self.catalogue, self.old, self.new, kept),
                *(() if self.loss is None else unlived(self.catalogue, kept, self.loss)),
                *uncovered,
                *incomplete(self.catalogue, schedule),
                *torn(self.catalogue, schedule),
                *self._memory(kept, schedule),
            ),
        )

    def _memory(self, kept: Rows, schedule: Schedule) -> tuple[str, ...]:
        if schedule.mode != "tight":
            return ()
        if self.budget_bytes is None:
            return ("mode tight is judged against a budget, and none was given",)
        return too_large(
            self.catalogue,
            (self.old, self.new),
            kept,
            schedule,
            self.ranks,
            budget_bytes=self.budget_bytes,
            padded=self.padded,
        )


def unplaced(catalogue: Catalogue, old: Ownership, new: Ownership) -> tuple[str, ...]:
    """Tensors that have no owner before or after."""
    return tuple(
        f"{tensor.name} has no owner in the {side} layout"
        for side, ownership in (("old", old), ("new", new))
        for tensor in catalogue
        if tensor.name not in ownership.placements
    )


def _strangers(part: RankPlan) -> tuple[str, ...]:
    """Moves in the wrong list."""
    return shown(
        [
            f"rank {part.rank} has among its {what} a move {move.src} -> {move.dst} (tensor {move.tensor})"
            for what, moves, ends in (
                ("sends", part.sends, (True, False)),
                ("receives", part.receives, (False, True)),
                ("relays", part.relays, (True, True)),
            )
            for move in moves
            if (move.src == part.rank, move.dst == part.rank) != ends
        ],
        "move(s) in the wrong list",
    )


def _adopted(parts: Sequence[RankPlan]) -> tuple[Ints, Ints, Ints]:
    """``(tensor, state, rank)`` of all adopted pieces, as columns."""
    rows = [(tensor, state, part.rank) for part in parts for tensor, state in part.adopted]
    tensor, state, rank = np.array(rows, np.int64).reshape(-1, 3).T
    return tensor, state, rank
