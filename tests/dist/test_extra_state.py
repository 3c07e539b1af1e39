"""Extra state of modules goes along with every switch and into checkpoints, bit by bit, or is refused by name."""

import pytest
import torch
from tests.dist.foreign import Books, Net, everywhere, groups_of, shard, switcher, until_ended
from torch import nn

from dynatrain.observe.checkpoints import newest
from dynatrain.train.saving import Saves


class Scaled(nn.Linear):
    """As fp8 layers keep it: a history of largest values, in no parameter and no buffer."""

    def __init__(self, width):
        super().__init__(width, width)
        self.history, self.recipe = torch.zeros(4), {"margin": 0}

    def get_extra_state(self):
        return {"history": self.history, "recipe": self.recipe}

    def set_extra_state(self, state):
        self.history, self.recipe = state["history"], state["recipe"]


class Copying(Scaled):
    def set_extra_state(self, state):
        self.history.copy_(state["history"])


class Forgetful(Scaled):
    set_extra_state = nn.Module.set_extra_state


def build_with(kind):
    def build(mesh, _layout):
        net = Net().double()
        net.blocks.append(nn.Sequential(kind(6).double()))
        shard(net, mesh)
        return net, torch.optim.AdamW(groups_of(net))

    return build


def write(net, number):
    for module in net.modules():
        if isinstance(module, Scaled):
            module.history = torch.full((4,), number / 3)
            module.recipe = {"margin": number}


def read(net):
    found = [module for module in net.modules() if isinstance(module, Scaled)]
    return [(module.history.tolist(), module.recipe["margin"]) for module in found]


def test_it_goes_along_and_comes_back_from_a_checkpoint(tmp_path):
    def work(world):
        books = Books()
        sw = switcher(
            world, build_with(Scaled), "fsdp2", recorder=books, data_parallel="free", saves=Saves(root=tmp_path)
        )
        write(sw.model, 5)
        seen, first = [read(sw.model)], sw.model
        sw.request("dp2")
        until_ended(sw, books)
        seen.append(read(sw.model))
        first.blocks[2][0].history += 1  # the old one is nobody's
        sw.save_now()
        write(sw.model, 8)
        sw.load(newest(tmp_path)[0])
        return seen, read(sw.model), first is not sw.model, books.ends

    for seen, loaded, other, ends in everywhere(2, work):
        assert [end[1] for end in ends] == ["committed"], ends
        assert other
        assert seen[0] == seen[1] == loaded == [(torch.full((4,), 5 / 3).tolist(), 5)]


def test_values_that_differ_between_ranks_refuse_the_switch_and_are_named():
    def work(world):
        books = Books()
        sw = switcher(world, build_with(Scaled), "fsdp2", recorder=books, data_parallel="free")
        write(sw.model, world.rank)
        sw.request("dp2")
        return until_ended(sw, books)

    for ((_, outcome, reason),) in everywhere(2, work):
        assert outcome == "aborted"
        assert "the extra state of blocks.2.0 is not equal on all ranks: ranks [1] differ from rank 0" in reason


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Forgetful, "blocks.2.0 has get_extra_state and no set_extra_state"), (Copying, "let it keep the tensors")],
)
def test_a_module_that_does_not_take_its_extra_state_over_is_refused_by_name(kind, said):
    def work(world):
        books = Books()
        try:
            sw = switcher(world, build_with(kind), "fsdp2", recorder=books, data_parallel="free")
        except ValueError as error:
            return str(error)
        sw.request("dp2")
        return until_ended(sw, books)[0][2]

    for reason in everywhere(2, work):
        assert "blocks.2.0" in reason
        assert said in reason
