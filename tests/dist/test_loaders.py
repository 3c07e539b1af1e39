"""96 ids, two epochs, workers that persist, switches and an abort on the way, a save and a resume in another world."""

import random
import warnings
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from tests.dist.foreign import Books, build_net, everywhere, switcher
from torch.nn import functional

from dynatrain.data.order import batch_ids
from dynatrain.layout.form import LayoutError
from dynatrain.layout.text import print_layout
from dynatrain.observe.checkpoints import newest
from dynatrain.train.loader import DatasetLoader, StreamLoader
from dynatrain.train.sample_streams import Seeded, apart
from dynatrain.train.saving import Saves

IDS, BATCH, SEED = 96, 8, 5
EPOCH = IDS // BATCH
TOUR = {3: "dp2.tp2", 7: "dp2.fsdp2", EPOCH - 1: "fsdp2.tp2", 14: "fsdp4"}
"""The last switch is aborted at its commit."""
SAVED = 17


def stream():
    """A shuffled ``StatefulDataLoader`` of single items."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata calls what torch has deprecated
        from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415
        from torchdata.stateful_dataloader.sampler import RandomSampler  # noqa: PLC0415

        sampler = RandomSampler(range(IDS), generator=torch.Generator().manual_seed(SEED))
        return StatefulDataLoader(range(IDS), batch_size=None, sampler=sampler)


class Noisy(torch.utils.data.Dataset):
    """Each item is its number, and what it draws: of torch's stream, numpy's and Python's."""

    def __len__(self):
        return IDS

    def __getitem__(self, i):
        return i, [float(torch.rand(())), np.random.rand(), random.random()]  # noqa: NPY002


class Loop:
    """A foreign loop that reads one dataset and one stream, and remembers what it was given at each step."""

    def __init__(self, world, layout, tour, root, *, faulty=0):
        self.rank, self.faulty = world.rank, faulty
        self.data = DatasetLoader(Noisy(), global_batch=BATCH, seed=SEED, num_workers=2, collate_fn=list)
        self.stream = StreamLoader(stream(), global_batch=BATCH)
        self.books, self.given = Books(), []
        self.sw = switcher(
            world,
            build_net,
            layout,
            data_parallel="free",
            schedule=tour,
            recorder=self.books,
            hook=self.hook,
            state={"data": self.data, "stream": self.stream},
            saves=Saves(root=root, every=5),
        )

    def hook(self, event, _number, switch):
        if (event, switch, self.rank) == ("commit", self.faulty, 1):
            raise RuntimeError("planted")

    def run(self, until):
        for step in self.sw.steps(until=until):
            items, others = self.data.next(self.sw), self.stream.next(self.sw)
            ids = torch.tensor([number for number, _ in items])
            layout, at = self.sw.layout, self.sw.layout.coordinates(self.rank)
            inputs = ids.double()[:, None].expand(-1, 5) / IDS
            functional.mse_loss(self.sw.model(inputs), inputs[:, :3]).backward()
            self.sw.optimizer.step()
            self.sw.optimizer.zero_grad()
            share = at.dp * layout.size("fsdp") + at.fsdp
            drawn = [its for _, its in items]
            self.given.append((step, print_layout(layout), share, ids.tolist(), others.tolist(), drawn))
        self.sw.save_now()
        states = [self.data.state_dict(), self.stream.state_dict()]
        workers = [worker.pid for worker in self.data._loader._iterator._workers]
        return self.given, states, [end[1] for end in self.books.ends], workers


def whole(ranks, which):
    """``(step, layout, global batch)`` of each step that was given out, put together from the ranks' shares."""
    found = []
    for rows in zip(*ranks, strict=True):
        (step, layout, *_), shares = rows[0], {}
        for row in rows:
            assert row[:2] == (step, layout)
            assert shares.setdefault(row[2], row[which]) == row[which]  # tp ranks see the same
        ways = len(shares)
        found.append((step, layout, [shares[i % ways][i // ways] for i in range(BATCH)]))
    return found


def test_every_id_comes_once_an_epoch_in_one_order_and_draws_its_own_through_switches_an_abort_and_a_resume(tmp_path):
    plain = stream()
    expected = {
        3: [batch_ids(SEED, step, BATCH, IDS).tolist() for step in range(2 * EPOCH)],
        4: torch.tensor([*plain, *plain]).view(-1, BATCH).tolist(),
    }
    alone = Seeded(Noisy(), SEED)
    with apart():
        drawn = [[alone[step // EPOCH, i][1] for i in ids] for step, ids in enumerate(expected[3])]
    first = everywhere(4, lambda world: Loop(world, "fsdp4", TOUR, tmp_path, faulty=4).run(SAVED))
    assert [ends for _, _, ends, _ in first] == [["committed", "committed", "committed", "aborted"]] * 4
    assert len({repr(states) for _, states, _, _ in first}) == 1

    def resumed(world):
        loop = Loop(world, "fsdp2", {SAVED + 2: "dp2"}, tmp_path)
        assert loop.sw.load(newest(tmp_path)[0]) == SAVED
        return loop.run(2 * EPOCH)

    second = everywhere(2, resumed)
    for which, batches in {**expected, 5: drawn}.items():
        begun = whole([rank[0] for rank in first], which)
        gone_on = whole([rank[0] for rank in second], which)
        places = {step: layout for step, layout, _ in begun}
        assert [step for step in places if step and places[step] != places[step - 1]] == [3, 7, EPOCH - 1]
        assert [row[:2] for row in begun[14:16]] == [(14, "fsdp4"), (14, "fsdp2.tp2")]  # taken back, and once more
        assert begun.pop(14)[2] == batches[14]
        assert [ids for _, _, ids in begun + gone_on] == batches
        for epoch in (batches[:EPOCH], batches[EPOCH:]) if which in expected else ():
            assert sorted(chain(*epoch)) == list(range(IDS))


def test_a_switch_that_the_data_cannot_serve_is_refused_at_once():
    def work(world):
        said = []
        data = DatasetLoader(range(IDS), global_batch=2, seed=SEED)
        sw = switcher(world, build_net, "dp2.tp2", data_parallel="free", state={"data": data})
        try:
            sw.request("fsdp4")
        except LayoutError as error:
            said.append(str(error))
        dist.barrier()
        sw.close()
        try:
            switcher(world, build_net, "fsdp4", name="again", data_parallel="free", state={"data": data})
        except LayoutError as error:
            said.append(str(error))
        return said

    for said in everywhere(4, work):
        assert len(said) == 2
        assert all("its 4 data ranks (dp x fsdp) do not divide the global batch of 2" in text for text in said)
