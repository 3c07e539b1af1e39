"""The judge after a loss: nothing from a lost rank, nothing of another step, nothing that its sender has not kept.

Who may send is not asked of the builder's rule. Each move is held against what is known of memory: is its box within
pieces that its source has, of the one step? That every element comes once is counted as in any other plan.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from dynatrain.judge.coverage import Rows, inside
from dynatrain.judge.holdings import Flags, Holdings, Ints
from dynatrain.judge.verdict import place, shown
from dynatrain.plan.plan import Fetch, Kept, Loss
from dynatrain.space.tensor import Catalogue

Fetched = Mapping[int, Sequence[Fetch]]
"""What each rank reads from files."""


def unfounded(catalogue: Catalogue, old: Holdings, moves: Rows, loss: Loss) -> tuple[str, ...]:
    """Moves from or to a lost holder, and moves of what their source has not of the loss's step."""
    found, elsewhere = np.zeros((2, len(moves.src)), np.bool_)
    for kept in loss.kept:
        has = _within(old, moves, kept)
        if kept.complete and kept.step == loss.step:
            found |= has
        else:
            elsewhere |= has
    gone = np.isin(np.stack([moves.src, moves.dst]), sorted(loss.lost))
    reasons = (
        (gone[0], "comes from a rank that is lost"),
        (~gone[0] & gone[1], "goes to a rank that is lost"),
        (~gone[0] & ~found & elsewhere, f"is not whole, or of another step than {loss.step}, where it comes from"),
        (~gone[0] & ~found & ~elsewhere, "is not among what its source has kept"),
    )
    return shown(
        [
            f"{place(catalogue[moves.tensor[i]], moves.state[i], moves.box(i, catalogue), int(moves.dst[i]))} {what} "
            f"(move from rank {moves.src[i]} to rank {moves.dst[i]})"
            for wrong, what in reasons
            for i in np.flatnonzero(wrong)
        ],
        "move(s) from where nothing is left",
    )


def unlived(catalogue: Catalogue, adopted: Rows, loss: Loss) -> tuple[str, ...]:
    """Adopted pieces that are not what their rank trains with at the loss's step."""
    live = {one.owner for one in loss.kept if one.live and one.step == loss.step and one.holder == one.owner}
    wrong = ~np.isin(adopted.dst, sorted(live - loss.lost))
    return shown(
        [
            f"{place(catalogue[adopted.tensor[i]], adopted.state[i], adopted.box(i, catalogue), int(adopted.dst[i]))} "
            f"is adopted, but the rank does not train with it at step {loss.step}"
            for i in np.flatnonzero(wrong)
        ],
        "piece(s) adopted that are not of the step",
    )


def misread(fetches: Fetched, loss: Loss | None) -> tuple[str, ...]:
    """Files read where no loss is, of another step, or by a rank that is lost."""
    reading = [rank for rank, boxes in sorted(fetches.items()) if boxes]
    if not reading or loss is None:
        return ("files are read although nothing is lost",) if reading else ()
    wrong = [f"rank {rank} reads files, and is lost" for rank in reading if rank in loss.lost]
    if loss.files != loss.step:
        wrong.append(f"files of step {loss.files} are read, and the run goes on from step {loss.step}")
    return shown(wrong, "rank(s) that cannot read")


def fetched_rows(fetches: Fetched, dims: int) -> Rows:
    """What is read from files, as rows that come from their own rank."""
    rows = [(rank, fetch) for rank, boxes in sorted(fetches.items()) for fetch in boxes]
    low, high = np.zeros((len(rows), dims), np.int64), np.ones((len(rows), dims), np.int64)
    for i, (_, fetch) in enumerate(rows):
        for dim, (start, stop) in enumerate(fetch.box):
            low[i, dim], high[i, dim] = start, stop
    rank = np.array([rank for rank, _ in rows], np.int64)
    tensor, state = np.array([fetch.granule for _, fetch in rows], np.int64).reshape(-1, 2).T
    return Rows(tensor=tensor, state=state, low=low, high=high, src=rank, dst=rank)


def _within(old: Holdings, moves: Rows, kept: Kept) -> Flags:
    """Which moves come from the holder of ``kept``, of a box that is in it."""
    kind = old.kinds(moves.tensor, moves.state)
    owner: Ints = np.full(len(kind), kept.owner)
    found = (moves.src == kept.holder) & inside(moves, old, kind, owner)
    return found if kept.owner == kept.holder else np.asarray(found & _alone(old, kept.owner)[kind])


def _alone(old: Holdings, rank: int) -> Flags:
    """Of which kinds no other rank holds an element of the box of ``rank``, (kinds,)."""
    low, high = (side[:, rank, None] for side in (old.low, old.high))
    meets = (np.maximum(old.low, low) < np.minimum(old.high, high)).all(axis=2) & old.held
    meets[:, rank] = False
    return np.asarray(old.held[:, rank] & ~meets.any(axis=1))
