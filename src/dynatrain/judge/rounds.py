"""The rounds: every granule once, no deadlock, and the memory that each rank holds on the way."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from dynatrain.judge.coverage import Rows
from dynatrain.judge.holdings import Holdings, Ints, Padded
from dynatrain.judge.verdict import named, place, shown
from dynatrain.plan.plan import Granule, Move, RankPlan, Schedule
from dynatrain.space.box import Box
from dynatrain.space.tensor import Catalogue

Message = tuple[Granule, Box, int, int]
"""One state of one move: ``(granule, box, src, dst)``. A rank waits in a round for each of its messages."""


def all_granules(catalogue: Catalogue) -> list[Granule]:
    """``(tensor, state)`` of the whole catalogue."""
    return [(index, at) for index, tensor in enumerate(catalogue) for at in range(len(tensor.states))]


def incomplete(catalogue: Catalogue, schedule: Schedule) -> tuple[str, ...]:
    """Granules that are in no round, in several, or unknown."""
    times = Counter(granule for granules in schedule.rounds for granule in granules)
    known = all_granules(catalogue)
    wrong = [
        f"{named(catalogue[tensor], state)} is in {times[tensor, state]} rounds, not in one"
        for tensor, state in known
        if times[tensor, state] != 1
    ]
    unknown = [f"granule {granule} of the schedule is not in the catalogue" for granule in times.keys() - set(known)]
    mode = [] if schedule.mode in {"keep", "tight"} else [f"mode {schedule.mode!r} is neither keep nor tight"]
    return (*mode, *shown(wrong, "granule(s) not in exactly one round"), *shown(sorted(unknown), "unknown granule(s)"))


def torn(catalogue: Catalogue, schedule: Schedule) -> tuple[str, ...]:
    """In ``tight``: what lies in one storage and is handed over in several rounds, so that it could not be freed."""
    if schedule.mode != "tight":
        return ()
    rounds: dict[tuple[str, int], set[int]] = {}
    for turn, granules in enumerate(schedule.rounds):
        for tensor, state in granules:
            if 0 <= tensor < len(catalogue) and catalogue[tensor].within:
                rounds.setdefault((catalogue[tensor].within, state), set()).add(turn)
    return shown(
        [
            f"state {state} of the segments of {name} is handed over in rounds {sorted(turns)}, and lies in one storage"
            for (name, state), turns in rounds.items()
            if len(turns) > 1
        ],
        "storage(s) handed over in parts",
    )


def too_large(
    catalogue: Catalogue,
    sides: tuple[Holdings, Holdings],
    adopted: Rows,
    schedule: Schedule,
    ranks: Ints,
    *,
    budget_bytes: int,
    padded: Padded,
) -> tuple[str, ...]:
    """Replays ``tight`` rounds: new pieces of a round are allocated on top of all that is held, then old ones freed."""
    granules = all_granules(catalogue)
    number = {granule: i for i, granule in enumerate(granules)}
    freed, taken = (side.storage(catalogue, granules, padded) for side in sides)
    kept = np.zeros_like(taken, np.bool_)
    rows = [number[granule] for granule in zip(adopted.tensor.tolist(), adopted.state.tolist(), strict=True)]
    kept[rows, adopted.dst] = True
    held = freed.sum(axis=0)
    freed, taken = np.where(kept, 0, freed), np.where(kept, 0, taken)
    limit = np.maximum(held, held + (taken - freed).sum(axis=0)) + budget_bytes
    problems = []
    for turn, members in enumerate(schedule.rounds):
        rows = [number[granule] for granule in members if granule in number]
        held = held + taken[rows].sum(axis=0)
        for rank in ranks[held[ranks] > limit[ranks]]:
            tensor, state = granules[rows[int(taken[rows, rank].argmax())]]
            problems.append(
                f"rank {rank} holds {held[rank]} bytes in round {turn}, {held[rank] - limit[rank]} above its limit "
                f"max(old, new) + {budget_bytes} = {limit[rank]}; the round's largest new piece there is "
                f"{named(catalogue[tensor], state)}"
            )
        held = held - freed[rows].sum(axis=0)
    return shown(problems, "time(s) that a rank holds too much")


def stuck(catalogue: Catalogue, parts: Sequence[RankPlan]) -> tuple[str, ...]:
    """Simulates the rounds of all ranks: what each waits for, and who never comes.

    A rank enters a round by posting its receives and sends of that round, and leaves it when each has met its partner.
    """
    sends, receives = ([_round_of(part, moves(part)) for part in parts] for moves in (_sends, _receives))
    ranks = {part.rank: i for i, part in enumerate(parts)}
    mine = [_by_round(part, s, r) for part, s, r in zip(parts, sends, receives, strict=True)]
    at = [0] * len(parts)

    def waits_for(i: int) -> Message | None:
        for message, peer, posted in mine[i][at[i]]:
            other = ranks.get(peer)
            theirs = None if other is None else (receives if posted == "send" else sends)[other].get(message)
            if other is None or theirs is None or theirs > at[other]:
                return message
        return None

    moving = True
    while moving:
        moving = False
        for i, part in enumerate(parts):
            while at[i] < len(part.schedule.rounds) and waits_for(i) is None:
                at[i] += 1
                moving = True
    problems = []
    for i, part in enumerate(parts):
        if at[i] < len(part.schedule.rounds) and (message := waits_for(i)):
            (tensor, state), box, src, dst = message
            peer = dst if src == part.rank else src
            problems.append(
                f"{place(catalogue[tensor], state, box, part.rank)} never leaves round {at[i]}: its move from rank "
                f"{src} to rank {dst} waits for rank {peer} for ever"
            )
    return shown(problems, "rank(s) that wait for ever")


def unmatched(catalogue: Catalogue, parts: Sequence[RankPlan]) -> tuple[str, ...]:
    """Messages that one end has and the other has not, or has in another round; rounds that differ between ranks."""
    sent, received = (
        Counter(message for part in parts for message in _messages(moves(part))) for moves in (_sends, _receives)
    )
    problems = []
    for one, other, text in ((sent, received, "sent but not received"), (received, sent, "received but not sent")):
        for message, times in (one - other).items():
            (tensor, state), box, src, dst = message
            rank = src if one is sent else dst
            problems.append(
                f"{place(catalogue[tensor], state, box, rank)} is {text} (move from rank {src} to rank {dst}, {times}x)"
            )
    differing = [part.rank for part in parts if part.schedule != parts[0].schedule]
    if differing:
        problems.append(f"rounds must be equal on all ranks; ranks {differing} have others than rank {parts[0].rank}")
    return shown(problems, "move(s) with one end only")


def _sends(part: RankPlan) -> tuple[Move, ...]:
    return part.sends


def _receives(part: RankPlan) -> tuple[Move, ...]:
    return part.receives


def _messages(moves: Iterable[Move]) -> Iterable[Message]:
    return (((move.tensor, state), move.box, move.src, move.dst) for move in moves for state in move.states)


def _round_of(part: RankPlan, moves: Iterable[Move]) -> dict[Message, int]:
    """In which round ``part`` posts each message; never, for granules that are in none."""
    turn = {granule: i for i, granules in enumerate(part.schedule.rounds) for granule in granules}
    return {message: turn[message[0]] for message in _messages(moves) if message[0] in turn}


def _by_round(
    part: RankPlan, sends: dict[Message, int], receives: dict[Message, int]
) -> list[list[tuple[Message, int, str]]]:
    """What ``part`` waits for in each round: ``(message, peer, what it posted)``."""
    found: list[list[tuple[Message, int, str]]] = [[] for _ in part.schedule.rounds]
    for message, turn in receives.items():
        found[turn].append((message, message[2], "receive"))
    for message, turn in sends.items():
        found[turn].append((message, message[3], "send"))
    return found
