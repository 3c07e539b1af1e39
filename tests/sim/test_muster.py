"""A step is applied on all survivors or on none, wherever ranks fall: the protocol of a loss, on values."""

import random
from dataclasses import dataclass

import pytest

from dynatrain.train.muster import decisive


@dataclass
class Rank:
    """So many steps applied; whether it has come into the coupling of the next; the last one that it is through."""

    applied: int = 0
    entered: bool = False
    coupled: tuple[int, str] | None = None

    @property
    def through(self):
        return self.coupled is not None and self.coupled[0] == self.applied


class World:
    """Ranks that train, fall and hold musters in a random order of everything."""

    def __init__(self, size, seed):
        self.random = random.Random(seed)
        self.ranks = {number: Rank() for number in range(size)}

    def go_on(self):
        """One move of one rank, if it has one; after a loss nobody comes through a coupling any more."""
        number = self.random.choice(sorted(self.ranks))
        rank = self.ranks[number]
        if rank.through:
            rank.applied, rank.entered = rank.applied + 1, False
        elif not rank.entered:
            rank.entered = True
        elif all((other.applied, other.entered) >= (rank.applied, True) for other in self.ranks.values()):
            rank.coupled = rank.applied, f"totals of {rank.applied}"

    def fall(self):
        """A random rank is gone."""
        del self.ranks[self.random.choice(sorted(self.ranks))]

    def mend(self, falls_in_muster):
        """Musters until one is held among those that are left."""
        told = {}
        waiting = sorted(self.ranks)
        self.random.shuffle(waiting)
        for place, number in enumerate(waiting):
            if falls_in_muster and place == len(waiting) // 2:
                self.fall()
                return self.mend(falls_in_muster - 1)
            if self.ranks[number].through and self.random.random() < 0.5:  # its update needs nobody
                self.ranks[number].applied += 1
                self.ranks[number].entered = False
            told[number] = self.ranks[number].coupled
        found = decisive(told.values())
        order = sorted(self.ranks)
        self.random.shuffle(order)
        late = self.random.randrange(len(order)) if falls_in_muster is None else len(order)
        for place, number in enumerate(order):
            if place == late and len(self.ranks) > 1:
                self.fall()  # some have taken the result, others not yet
                return self.mend(0)
            if number in self.ranks:
                self.take(self.ranks[number], found)
        return found

    @staticmethod
    def take(rank, found):
        if found is not None and found[0] == rank.applied:
            assert rank.entered, "somebody came through a coupling that not all had come into"
            rank.coupled = found
        if rank.through:
            rank.applied, rank.entered = rank.applied + 1, False


def survivors_stand_at_one_step(seed):
    world = World(2 + seed % 4, seed)
    for _ in range(world.random.randrange(60)):
        world.go_on()
    most = max(rank.applied for rank in world.ranks.values())
    world.fall()

    if world.ranks:
        world.mend(world.random.choice((0, 1, None)) if len(world.ranks) > 2 else 0)

        stand = {rank.applied for rank in world.ranks.values()}
        assert len(stand) == 1
        assert stand.pop() in {most - 1, most, most + 1}


@pytest.mark.parametrize("hundred", range(10))
def test_survivors_stand_at_one_step_wherever_ranks_fall(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        survivors_stand_at_one_step(seed)


def test_without_the_muster_they_would_not(monkeypatch):
    monkeypatch.setitem(globals(), "decisive", lambda _told: None)

    def all_seeds():
        for seed in range(400):
            survivors_stand_at_one_step(seed)

    with pytest.raises(AssertionError):
        all_seeds()


def test_the_newest_coupling_decides():
    assert decisive([(3, "old"), None, (4, "new"), (3, "old")]) == (4, "new")
    assert decisive([None, None]) is None
