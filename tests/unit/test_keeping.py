"""When snapshots begin: on all ranks at one step, and not before the one before is whole on all of them."""

import random
from types import SimpleNamespace

import pytest
from tests.stamped import job, owns
from torch.distributed import HashStore

from dynatrain.cluster.board import Board
from dynatrain.train import keeping
from dynatrain.train.keeping import Keeping, Keeps

JOB = job()
SIZE = 3


class Taking:
    """Stands for the work: done when the test says."""

    def __init__(self, _party, _world, note, *_):
        self.note, self.done, self.refused = note, False, False

    def start(self):
        pass

    def wait_copied(self):
        pass

    def give_up(self):
        pass

    def refuse(self):
        self.refused = self.done = True

    def end(self, *, whole=True):
        self.note.own_whole = self.note.wards_whole = whole
        self.done = True


def make(monkeypatch, store, told, nodes=(0,) * SIZE):
    """The snapshots of all ranks."""
    monkeypatch.setattr(keeping, "Account", SimpleNamespace(of=lambda *_: None))
    monkeypatch.setattr(keeping, "extra_states", lambda _owners: {})
    monkeypatch.setattr(keeping, "_Taking", Taking)
    world = SimpleNamespace(catalogue=JOB, ownership=owns(JOB, "fsdp3"), owners=[])
    return [
        Keeping(
            SimpleNamespace(rank=rank, world_size=SIZE, nodes=nodes, everyone=range(SIZE), board=Board(store, SIZE)),
            world,
            Keeps(every=4),
            7,
            lambda note, _keepers, rank=rank: told.append((rank, note.step)),
        )
        for rank in range(SIZE)
    ]


@pytest.fixture
def ranks(monkeypatch):
    store, told = HashStore(), []
    return make(monkeypatch, store, told), store, told


def test_the_keeper_is_on_another_node_also_where_nodes_have_not_equally_many_ranks(monkeypatch):
    for one in make(monkeypatch, HashStore(), [], nodes=(0, 1, 1)):
        assert one._keepers.keeper[1:] == (0, 0)
        assert one._keepers.keeper[0] in {1, 2}


@pytest.mark.parametrize("seed", range(20))
def test_snapshots_are_of_one_step_on_all_ranks_and_the_last_whole_one_stays(ranks, seed):
    made, store, told = ranks
    draw, edges, begun = random.Random(seed), [0] * SIZE, [[] for _ in made]
    for _ in range(400):
        rank = draw.randrange(SIZE)
        if edges[rank] > min(edges):
            continue  # every step couples all ranks
        one = made[rank]
        if one._under_way is not None and draw.random() < 0.2:
            one._under_way.end()
        before = one.notes
        one.edge(edges[rank], edges[rank])
        edges[rank] += 1
        if one.notes[-1:] != before[-1:]:
            begun[rank].append(one.notes[-1].step)
            last = begun[rank][-2] if len(begun[rank]) > 1 else None
            if last is not None:
                whole = [note.step for other in made for note in other.notes if note.whole]
                assert whole.count(last) == SIZE
        assert len(one.notes) <= 2

    shortest = min(map(len, begun))
    assert shortest > 1
    assert len({tuple(steps[:shortest]) for steps in begun}) == 1
    assert all(step % 4 == 0 for step in begun[0])
    assert {step for _, step in told} <= {*begun[0]}
    for one in made:
        one.end()
    assert store.num_keys() <= 3  # of a question that not all ranks had asked yet


def test_one_that_never_gets_whole_is_the_last_and_the_one_before_stays(ranks):
    made, _, told = ranks
    for edge in range(20):
        for rank, one in enumerate(made):
            if one._under_way is not None:
                one._under_way.end(whole=edge < 4 or rank != 1)
            one.edge(edge, edge)
    assert [[note.step for note in one.notes] for one in made] == [[0, 4]] * SIZE
    assert all(one.notes[0].whole for one in made)
    assert (1, 4) not in told


def test_one_that_was_refused_is_dropped_on_all_and_the_next_is_begun_when_it_is_due(ranks):
    made, _, told = ranks
    for edge in range(20):
        for one in made:
            if one._under_way is not None:
                one._under_way.refuse() if one.notes[-1].step == 4 else one._under_way.end()
            one.edge(edge, edge)
            assert edge not in range(5, 9) or [note.step for note in one.notes if note.whole] == [0]
    assert [[note.step for note in one.notes] for one in made] == [[12, 16]] * SIZE
    assert sorted(told) == [(rank, step) for rank in range(SIZE) for step in (0, 8, 12, 16)]
