"""Address stamps and poison over a save in one layout and a load in another: each element lands where it belongs."""

import random
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tests.addresses import STATES, held
from tests.jobs import everywhere
from tests.legs import leg, legal_texts
from tests.walks import LAYERS, TENSORS, Walker

from dynatrain.execute.shelf import Stored
from dynatrain.observe.checkpoints import newest
from dynatrain.space.box import volume
from dynatrain.space.tensor import ITEMSIZE
from dynatrain.train import loading, saving
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.saving import Saves

STEP = 7


def save(world, text, root):
    walker = Walker(world, text, saves=Saves(root=root))
    walker.scaler.scale.fill_(1234.0)
    walker.sw.step = STEP
    return walker.sw.save_now()


class Reader:
    """A rank in poisoned memory, and what it reads."""

    def __init__(self, world, text, root):
        self.walker, self.text, self.root = Walker(world, text), text, root
        self.nbytes = 0
        self.opened = set()
        self.plant = lambda shelf, _catalogue, fetches: (shelf, fetches)
        reading = loading.read_into

        def read_into(pieces, shelf, catalogue, fetches):
            shelf, fetches = self.plant(shelf, catalogue, fetches)
            for fetch in fetches:
                self.nbytes += volume(fetch.box) * ITEMSIZE[state_of(catalogue, fetch).dtype]
            reading(pieces, shelf, catalogue, fetches)

        loading.read_into = read_into
        sys.addaudithook(self._hook)

    def _hook(self, event, arguments):
        if event == "open" and str(arguments[0]).endswith(".distcp"):
            self.opened.add(int(str(arguments[0]).rpartition("__")[2].split("_")[0]))

    def load(self):
        """What is not as stamped."""
        for value in self.walker.sw.world.values().values():
            value.fill_(torch.nan)
        self.walker.scaler.scale.fill_(0)
        step = self.walker.sw.load(newest(self.root)[0])
        assert (step, self.walker.sw.step, self.walker.scaler.scale) == (STEP, STEP, 1234)
        return self.walker.misplaced(self.text)

    def untouched(self):
        return all(value.isnan().all() for value in self.walker.sw.world.values().values())


def state_of(catalogue, fetch):
    return catalogue[fetch.granule[0]].states[fetch.granule[1]]


def carried(pair, root):
    """Save in one layout and load in the other, on as many ranks as each has; of each rank what it found."""

    def load(world):
        reader = Reader(world, pair[1], root)
        wrong = reader.load()
        return wrong, reader.nbytes, held(pair[1], TENSORS, world.rank, LAYERS), reader.opened

    everywhere(leg(pair[0]).size, lambda world: save(world, pair[0], root))
    return everywhere(leg(pair[1]).size, load)


def some_pairs(seed, count):
    """Layouts whose stages the stamps' own arithmetic knows: even ones."""
    texts = [t for n in range(1, 9) for t in legal_texts(n, micro_batches=8) if "_" not in t and "pp3" not in t]
    return pairwise(random.Random(seed).sample(texts, count + 1))


LONG = [pytest.param(pair, marks=pytest.mark.sweep) for seed in (1, 2, 3) for pair in some_pairs(seed, 12)]


@pytest.mark.parametrize(
    "pair", [("fsdp4", "pp2.tp2"), ("pp2.tp2", "fsdp3"), ("dp2", "fsdp2.tp2.order_0_2_1_3"), *LONG], ids=" to ".join
)
def test_every_element_lands_at_its_address_and_a_rank_reads_its_own_and_no_more(tmp_path, pair):
    for wrong, read, mine, _ in carried(pair, tmp_path):
        assert wrong == []
        assert read == mine


@pytest.mark.parametrize("layout", ["fsdp4", "pp2.fsdp2"])
def test_in_the_same_layout_a_rank_opens_its_own_file_and_those_with_the_scalars(tmp_path, layout):
    """Scalars are in the file of the first rank of their stage, and what concerns all is in the file of rank 0."""
    found = carried((layout, layout), tmp_path)
    first = [0, 0, 0, 0] if layout == "fsdp4" else [0, 0, 2, 2]
    assert [opened for *_, opened in found] == [{0, first[rank], rank} for rank in range(4)]


def row_off(shelf, catalogue, fetches, state):
    """One read takes the rows of its file one off."""
    fetch = next(f for f in fetches if state_of(catalogue, f).name == state and f.box and f.box[0][1] - f.box[0][0] > 1)
    key = catalogue[fetch.granule[0]].name, state
    of_tensor = list(shelf[key])
    stored = of_tensor[fetch.place]
    of_tensor[fetch.place] = Stored(stored.box, stored.tensor.roll(1, 0), stored.path)
    return {**shelf, key: tuple(of_tensor)}, fetches


def left_out(shelf, catalogue, fetches, state):
    """One read is not made."""
    gone = next(fetch for fetch in fetches if state_of(catalogue, fetch).name == state)
    return shelf, tuple(fetch for fetch in fetches if fetch is not gone)


def swapped(shelf, catalogue, fetches, state):
    """One tensor's state is read from the place of another."""
    other = STATES[(STATES.index(state) + 1) % 3]
    name = next(catalogue[f.granule[0]].name for f in fetches if state_of(catalogue, f).name == state)
    return {**shelf, (name, state): shelf[name, other], (name, other): shelf[name, state]}, fetches


FAULTS = [(row_off, kind) for kind in STATES if kind != "step"]
FAULTS += [(left_out, kind) for kind in STATES]
FAULTS += [(swapped, kind) for kind in STATES[:3]]


def test_a_read_that_goes_wrong_in_any_state_is_noticed(tmp_path):
    def work(world):
        reader, missed = Reader(world, "fsdp2.tp2", tmp_path), []
        for fault, state in FAULTS:
            reader.plant = lambda *given, fault=fault, state=state: fault(*given, state)
            wrong = reader.load()
            if state not in {found for _, found, _ in wrong}:
                missed.append((fault.__name__, state))
        return missed

    everywhere(2, lambda world: save(world, "tp2", tmp_path))
    assert everywhere(4, work) == [[]] * 4


def plan_shifted(fetches):
    at = next(n for n, fetch in enumerate(fetches) if len(fetch.box) == 2)
    (start, stop), *rest = fetches[at].box
    return (*fetches[:at], replace(fetches[at], box=((start + 1, stop + 1), *rest)), *fetches[at + 1 :])


PLANS = {
    "shifted": plan_shifted,
    "left out": lambda fetches: fetches[1:],
    "twice": lambda fetches: (*fetches, fetches[0]),
    "of another state": lambda fetches: (replace(fetches[0], granule=fetches[1].granule), *fetches[1:]),
}


def test_a_plan_that_reads_wrong_is_refused_before_anything_is_written(tmp_path):
    def work(world):
        reader, planned, said = Reader(world, "tp2", tmp_path), loading.reads, {}
        for value in reader.walker.sw.world.values().values():
            value.fill_(torch.nan)
        for name, fault in PLANS.items():
            # One rank's plan alone.
            loading.reads = lambda *given, fault=fault: (fault if world.rank else tuple)(planned(*given))
            with pytest.raises(SwitchAbortedError) as refusal:
                reader.walker.sw.load(newest(tmp_path)[0])
            said[name] = str(refusal.value), reader.untouched()
        return said

    everywhere(2, lambda world: save(world, "fsdp2", tmp_path))
    for said in everywhere(2, work):
        assert said.keys() == PLANS.keys()
        for words, untouched in said.values():
            assert "rank 1: FolderError" in words
            assert untouched


def test_two_states_that_change_places_in_a_save_are_noticed(tmp_path):
    def swapping(world):
        taking = saving.Taken.of

        def take(*given):
            taken = taking(*given)
            found = taken.chunks
            a, b = (
                next(n for n, chunk in enumerate(found) if chunk.key.endswith(f"up.weight.{state}"))
                for state in ("exp_avg", "exp_avg_sq")
            )
            found[a], found[b] = replace(found[a], data=found[b].data), replace(found[b], data=found[a].data)
            return taken

        saving.Taken.of = take
        return save(world, "fsdp2", tmp_path)

    everywhere(2, swapping)
    for wrong in everywhere(2, lambda world: Reader(world, "tp2", tmp_path).load()):
        assert {state for _, state, _ in wrong} == {"exp_avg", "exp_avg_sq"}
