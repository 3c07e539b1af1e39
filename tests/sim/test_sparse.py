"""Random sparse traffic among five ranks, by the rounds and the waves of the product, with random delays.

No tensor moves. As the late double has it (tests/doubles.py), nothing travels before both ends wait for it: a wave is
through when everybody whom it names waits for the same messages. So whoever could hang does.
"""

import random

import pytest

from dynatrain.execute import wire
from dynatrain.judge.rounds import stuck, unmatched
from dynatrain.plan.plan import Move, RankPlan, Schedule
from dynatrain.space.tensor import State, Tensor

RANKS = 5


@pytest.fixture(autouse=True)
def _small_bundles(monkeypatch):
    """Several waves of a pair."""
    monkeypatch.setattr(wire, "BUNDLE_BYTES", 64)
    monkeypatch.setattr(wire, "PACK_BYTES", 16)


def traffic(seed):
    """A catalogue, and every rank's part: some pairs exchange something, in some rounds."""
    draw = random.Random(seed)
    density = draw.uniform(0.1, 0.9)
    pairs = [(src, dst) for src in range(RANKS) for dst in range(RANKS) if src != dst and draw.random() < density]
    sizes = [draw.choice((1, 3, 20, 50)) for _ in pairs]
    catalogue = tuple(
        Tensor(f"of {src} for {dst}", (size,), (), (0,), (State("param", "float32"),), "all")
        for (src, dst), size in zip(pairs, sizes, strict=True)
    )
    granules = [(index, 0) for index in range(len(pairs))]
    draw.shuffle(granules)
    rounds = tuple(tuple(granules[turn::3]) for turn in range(3) if granules[turn::3])
    moves = [Move(i, (0,), ((0, size),), *pair) for i, (pair, size) in enumerate(zip(pairs, sizes, strict=True))]
    return catalogue, [part_of(rank, moves, rounds) for rank in range(RANKS)]


def part_of(rank, moves, rounds):
    sends, receives = (tuple(move for move in moves if getattr(move, end) == rank) for end in ("src", "dst"))
    return RankPlan(rank, sends, receives, (), (), Schedule(rounds, "keep"))


def waits(part, catalogue):
    """What a rank waits for, one after the other: sets of ``(round, src, dst, number among those of the pair)``."""
    found = []
    for turn, route in enumerate(wire.routes(part, catalogue, RANKS)):
        number = {}
        for wave in route.waves:
            messages = set()
            for bundles, pair in ((wave.sends, lambda p: (part.rank, p)), (wave.receives, lambda p: (p, part.rank))):
                for bundle in bundles:
                    at = number[pair(bundle.peer)] = number.get(pair(bundle.peer), -1) + 1
                    messages.add((turn, *pair(bundle.peer), at))
            found.append(messages)
        sums = {(turn, part.rank, peer, "sums") for peer in route.sends}
        found.append(sums | {(turn, peer, part.rank, "sums") for peer in route.receives})
    return found


def play(everybody, seed):
    """Seconds until each rank is through; None for a rank that waits for ever."""
    draw = random.Random(seed)
    place = [{message: at for at, messages in enumerate(of) for message in messages} for of in everybody]
    entered = [[draw.random()] for _ in range(RANKS)]  # when a rank began to wait for each of its sets

    def through(rank):
        """When the rank has all that it waits for; None while somebody is not there yet."""
        at = len(entered[rank]) - 1
        last = entered[rank][at]
        for message in everybody[rank][at]:
            peer = message[2] if message[1] == rank else message[1]
            there = place[peer][message]
            if there >= len(entered[peer]):
                return None
            last = max(last, entered[peer][there])
        return last

    moving = True
    while moving:
        moving = False
        for rank in draw.sample(range(RANKS), RANKS):
            while len(entered[rank]) <= len(everybody[rank]) and (at := through(rank)) is not None:
                entered[rank].append(at + draw.expovariate(10))
                moving = True
    return [times[-1] if len(times) > len(of) else None for times, of in zip(entered, everybody, strict=True)]


def test_two_thousand_random_matrices_are_carried_without_a_hang():
    messages = 0
    for seed in range(2000):
        catalogue, parts = traffic(seed)
        everybody = [waits(part, catalogue) for part in parts]
        assert unmatched(catalogue, parts) == stuck(catalogue, parts) == ()
        assert None not in play(everybody, seed), seed
        messages += sum(len(of) for sets in everybody for of in sets)
    assert messages > 2000 * RANKS


def test_waves_in_an_order_that_goes_round_hang_as_they_must():
    """Each rank's own next neighbour first: nobody is ever waited for by whom it waits for."""
    hung = 0
    for seed in range(200):
        catalogue, parts = traffic(seed)
        everybody = []
        for rank, part in enumerate(parts):
            alone = [{message} for messages in waits(part, catalogue) for message in messages]
            everybody.append(sorted(alone, key=lambda one, rank=rank: [after(rank, message) for message in one]))
        hung += None in play(everybody, seed)
    assert hung > 50


def after(rank, message):
    turn, src, dst, number = message
    return turn, number == "sums", ((dst if src == rank else src) - rank) % RANKS, str(number)


@pytest.mark.parametrize("ring", [2, 3, 5])
def test_the_judge_finds_rounds_whose_order_goes_round(ring):
    """Rank r has the round of its next neighbour first, and that of its last neighbour second."""
    catalogue, parts = whole_ring(ring)
    assert stuck(catalogue, parts) == ()
    bad = [RankPlan(p.rank, p.sends, p.receives, (), (), Schedule(ordered(p.rank, ring), "keep")) for p in parts[:ring]]
    problems = stuck(catalogue, [*bad, *parts[ring:]])

    assert len(problems) == ring
    assert all("for ever" in problem for problem in problems)


def whole_ring(ring):
    catalogue = tuple(Tensor(f"of {rank}", (4,), (), (0,), (State("param", "float32"),), "all") for rank in range(ring))
    moves = [Move(rank, (0,), ((0, 4),), rank, (rank + 1) % ring) for rank in range(ring)]
    rounds = tuple(((rank, 0),) for rank in range(ring))
    return catalogue, [part_of(rank, moves, rounds) for rank in range(RANKS)]


def ordered(rank, ring):
    first, second = rank, (rank - 1) % ring  # what it sends, and what it receives
    rest = [at for at in range(ring) if at not in {first, second}]
    return tuple(((at, 0),) for at in (first, second, *rest))
