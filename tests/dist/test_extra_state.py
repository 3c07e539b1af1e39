"""Extra state of modules goes along with every switch and into checkpoints, bit by bit, or is refused by name."""

import pytest
import torch
from tests.dist.foreign import Books, Net, everywhere, groups_of, shard, switcher, until_ended
from torch import nn
from torch.distributed.fsdp import fully_shard

from dynatrain.layout.stages import held_stages
from dynatrain.layout.text import parse_layout
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


class Odd:
    """What could only be read by running code."""


class Scale(nn.Module):
    """Extra state alone."""

    def __init__(self):
        super().__init__()
        self.history, self.recipe = torch.zeros(4), {"margin": 0}

    get_extra_state, set_extra_state = Scaled.get_extra_state, Scaled.set_extra_state


class Stage(nn.Module):
    """Some of four blocks, and a module that every stage has."""

    def __init__(self, numbers):
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Scaled(6) for number in numbers})
        self.everywhere = Scale()


def build_stages(mesh, layout):
    held, each = held_stages(layout, mesh.get_local_rank("pp")), 4 // layout.num_stages
    parts = [Stage(range(stage * each, (stage + 1) * each)).double() for stage in held]
    for part in parts:
        fully_shard(part, mesh=mesh["dp", "fsdp"])
    return parts, torch.optim.AdamW([p for part in parts for p in part.parameters()])


def scaled(sw):
    found = [pair for part in sw.parts for pair in part.named_modules()]
    return [(path, module) for path, module in found if isinstance(module, Scaled | Scale)]


def held(sw):
    """What this rank's modules have, by name; those of one name are equal."""
    found = {}
    for path, module in scaled(sw):
        found.setdefault(path, set()).add((*module.history.tolist(), module.recipe["margin"]))
    assert all(len(values) == 1 for values in found.values())
    return {path: values.pop() for path, values in found.items()}


def number_of(path):
    return 9 if path == "everywhere" else 1 + int(path[-1])


def write_stages(sw, more=0):
    for path, module in scaled(sw):
        module.history = torch.full((4,), (number_of(path) + more) / 3)
        module.recipe = {"margin": number_of(path) + more}


def right(sw, more=0):
    """How many names this rank holds, if each has its own value."""
    found = held(sw)
    wanted = {p: (*torch.full((4,), (number_of(p) + more) / 3).tolist(), number_of(p) + more) for p in found}
    return len(found) if found == wanted else found


def test_it_follows_its_module_to_other_stages_and_through_checkpoints(tmp_path):
    def work(world):
        books, seen = Books(), []
        settings = {"legal": lambda text, _: parse_layout(text), "data_parallel": "free", "saves": Saves(root=tmp_path)}
        sw = switcher(world, build_stages, "fsdp2", recorder=books, **settings)
        write_stages(sw)
        for layout in ("pp2v2", "pp2.order_1_0", "dp2", "pp2"):
            sw.request(layout)
            until_ended(sw, books)
            seen.append(right(sw))
        write_stages(sw, 10)
        sw.save_now()
        sw.close()
        for layout in ("fsdp2", "pp2v2.order_1_0"):
            other = switcher(world, build_stages, layout, name=layout, **settings)
            other.load(newest(tmp_path)[0])
            seen.append(right(other, 10))
            other.close()
        return seen, books.ends

    for seen, ends in everywhere(2, work):
        assert [end[1:] for end in ends] == [("committed", "")] * 4
        assert seen == [3, 3, 5, 3, 5, 3]


def test_what_differs_between_stages_or_could_not_go_to_another_is_refused_by_name():
    def work(world):
        books, said = Books(), {}
        sw = switcher(
            world, build_stages, "pp2v2", recorder=books, legal=lambda text, _: parse_layout(text), data_parallel="free"
        )

        def attempt(name, parts, value):
            for part in parts:
                part.everywhere.recipe = {"margin": value}
            sw.request("pp2")
            ((_, _, said[name]),) = until_ended(sw, books)
            write_stages(sw)

        write_stages(sw)
        attempt("ranks", sw.parts, 9 + world.rank)
        attempt("parts", sw.parts[1:], 10)
        attempt("code", sw.parts, Odd())
        return said, right(sw)

    for said, kept in everywhere(2, work):
        assert kept == 3
        assert "everywhere is not equal in all stages of this rank" in said["parts"]
        assert "the extra state of everywhere is not equal on all ranks: ranks [1] differ from rank 0" in said["ranks"]
        assert "the extra state of everywhere could not follow it to another stage; keep to numbers" in said["code"]
