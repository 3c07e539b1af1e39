"""How plans look to people."""

from collections.abc import Iterable, Iterator

from dynatrain.app.output import columns, emit, say, seconds, size
from dynatrain.app.planned import Change, timed
from dynatrain.plan.plan import Move, RankPlan
from dynatrain.plan.record import PlanRecord
from dynatrain.plan.schedule import predicted_peak
from dynatrain.plan.summary import PlanSummary
from dynatrain.plan.table import WholePlan
from dynatrain.space.box import Box, volume
from dynatrain.space.tensor import ITEMSIZE

SHOWN_MOVES = 1000
SHOWN_RANKS = 16


def head(change: Change, model: str) -> tuple[str, ...]:
    """What is planned."""
    parameters = sum(tensor.numel for tensor in change.catalogue)
    state = sum(tensor.nbytes(one) for tensor in change.catalogue for one in tensor.states)
    old, new = change.layouts
    before, after = change.old.layout.world_size, change.new.layout.world_size
    leave, come = set(range(before)) - {*change.new.layout.ranks}, set(change.new.layout.ranks) - {*range(before)}
    told = [f"ranks that {what}: {_listed(who)}" for what, who in (("leave", leave), ("come", come)) if who]
    return (
        f"{old} -> {new}  ({before} -> {after} ranks, mode {change.mode})",
        *told,
        f"{model}: {parameters:,} parameters, {size(state)} of state in {len(change.catalogue)} tensors",
        "",
    )


def show(change: Change, model: str, mode: str, *, json: bool) -> None:
    """Print what a change of a run would move and need.

    Args:
        change: planned; of ``auto`` as ``keep``, as whether that fits is known to the ranks alone.
        model: its name.
        mode: that the run would have.
        json: print one JSON object.
    """
    whole, took = timed(change.whole)
    summary = change.summary(whole)
    record = change.record(whole, summary)
    if json:
        emit(plan_record(record, change) | {"configured": mode})
        return
    say(*head(change, model))
    if mode == "auto":
        say("The run decides itself: keep where that fits into memory, as planned here, else tight.", "")
    rank_table(summary)
    say(*numbers(change, summary, record.plan_hash, took, None), "Nothing was asked of the run.")


def rank_table(summary: PlanSummary) -> None:
    """Bytes of each rank of a small world, and of the extremes of a large one."""
    parts = list(zip(summary.bytes_in, summary.bytes_out, summary.relaid, summary.adopted, summary.peak, strict=True))
    if len(parts) <= SHOWN_RANKS:
        rows = [(str(rank), *map(size, part)) for rank, part in enumerate(parts)]
    else:
        by_column = list(zip(*parts, strict=True))
        rows = [("least", *map(size, map(min, by_column))), ("most", *map(size, map(max, by_column)))]
    columns(("rank", "in", "out", "re-laid", "adopted", "peak"), rows)


def moves_of_part(change: Change, part: RankPlan) -> Iterator[str]:
    """One rank's moves, and its sums."""
    kinds = (("receives", part.receives), ("sends", part.sends), ("re-lays", part.relays))
    for what, moves in kinds:
        yield f"rank {part.rank} {what} {size(sum(_bytes(change, move) for move in moves))} in {len(moves)} moves"
        yield from _lines(change, moves, len(moves))
    peak = predicted_peak(change.storage, change.schedule)
    adopted = sum(_held(change, granule, part.rank) for granule in part.adopted)
    yield f"rank {part.rank} adopts {size(adopted)} in {len(part.adopted)} pieces, where they lie"
    yield f"rank {part.rank} needs at most {size(int(peak[part.rank]))} at one time"


def moves_of_plan(change: Change, plan: WholePlan) -> Iterator[str]:
    """Every move of a small plan, in the order of tensors; of a large one, how to see them."""
    table = plan.moves
    count = len(table.tensor)
    if count > SHOWN_MOVES:
        yield f"{count:,} moves; --rank R prints those of one rank"
        return
    moves = (
        Move(tensor, states, table.box(row, _dims(change, tensor, states)), int(table.src[row]), int(table.dst[row]))
        for row, (tensor, group) in enumerate(zip(table.tensor.tolist(), table.group.tolist(), strict=True))
        for states in (table.groups[group],)
    )
    yield from ("", f"{count} moves")
    yield from _lines(change, sorted(moves, key=lambda move: (move.tensor, move.states, move.box, move.dst)), count)


def numbers(
    change: Change, summary: PlanSummary, plan_hash: str, whole_took: float, part_took: float | None
) -> Iterator[str]:
    """The whole plan in numbers, and how long it took to derive."""
    yield ""
    sums = f"moved {size(summary.moved)}, re-laid {size(sum(summary.relaid))}, adopted {size(sum(summary.adopted))}"
    yield f"all ranks: {sums}, in {summary.rounds} rounds"
    held = max(change.storage.old.max(), change.storage.new.max())
    budget = f", budget {size(change.budget_bytes)}" if change.budget_bytes else ""
    yield f"peak of a rank: {size(max(summary.peak))} (largest before or after: {size(int(held))}{budget})"
    together = change.ranks_per_node or len(summary.peak)
    machine = f"{size(summary.floor_machine)} written by one machine of {together} ranks"
    yield f"floor: {size(summary.floor_link)} over one link, {machine}"
    part = f"this rank's part derived in {seconds(part_took)}, " if part_took is not None else ""
    yield f"plan {plan_hash}: {part}the whole in {seconds(whole_took)}"


def plan_record(record: PlanRecord, change: Change) -> dict[str, object]:
    """The whole plan in numbers, for programs."""
    return {
        "from": record.from_,
        "to": record.to,
        "mode": record.mode,
        "members": record.members,
        "world": {"old": change.old.layout.world_size, "new": change.new.layout.world_size},
        "plan_hash": record.plan_hash,
        "rounds": record.rounds,
        "bytes": dict(record.bytes),
        "peak_bytes": record.peak_bytes,
        "floor_bytes": dict(record.floor_bytes),
    }


def _lines(change: Change, moves: Iterable[Move], count: int) -> Iterator[str]:
    for _, move in zip(range(SHOWN_MOVES), moves, strict=False):
        tensor = change.catalogue[move.tensor]
        states = " ".join(tensor.states[state].name for state in move.states)
        where = "re-laid" if move.src == move.dst else f"from {move.src}"
        yield f"  {tensor.name} {_bounds(move.box)} {states}: {where} to {move.dst}, {size(_bytes(change, move))}"
    if count > SHOWN_MOVES:
        yield f"  ... and {count - SHOWN_MOVES} more; --json prints all"


def _listed(ranks: set[int]) -> str:
    if len(ranks) > SHOWN_RANKS:
        return f"{min(ranks)} .. {max(ranks)} ({len(ranks)})"
    return ", ".join(map(str, sorted(ranks)))


def _bounds(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def _dims(change: Change, tensor: int, states: tuple[int, ...]) -> int:
    one = change.catalogue[tensor]
    return len(one.state_shape(one.states[states[0]]))


def _bytes(change: Change, move: Move) -> int:
    states = change.catalogue[move.tensor].states
    return volume(move.box) * sum(ITEMSIZE[states[state].dtype] for state in move.states)


def _held(change: Change, granule: tuple[int, int], rank: int) -> int:
    tensor = change.catalogue[granule[0]]
    state = tensor.states[granule[1]]
    return volume(change.new.state_box(tensor, state, rank) or ()) * ITEMSIZE[state.dtype]
