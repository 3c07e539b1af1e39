"""Extra state of modules goes along with every switch and into checkpoints, bit by bit, or is refused by name."""

import pytest
import torch
from tests.dist.foreign import Books, Net, everywhere, groups_of, shard, switcher, until_ended
from torch import nn
from torch.distributed.fsdp import fully_shard

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


LAYERS = 4


class Odd:
    """What no reader of a pickle knows."""


class Bare(nn.Module):
    """Has extra state and no tensor."""

    value = 0

    def get_extra_state(self):
        return {"value": self.value}

    def set_extra_state(self, state):
        self.value = state["value"]


class Stage(nn.Module):
    """The layers of a stage under their global numbers; the first stage has something bare, too."""

    def __init__(self, numbers, *, bare):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Scaled(6).double() for number in numbers})
        self.bare = Bare() if bare else None


def staged(*, bare_in=(1, 2)):
    """A build in stages; how many there are in layouts that have the bare module."""

    def build(mesh, layout):
        stage, stages = mesh.get_local_rank("pp"), layout.size("pp")
        numbers = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
        part = Stage(numbers, bare=stage == 0 and stages in bare_in)
        fully_shard(part, mesh=mesh["fsdp"])
        return part, torch.optim.AdamW(part.parameters())

    return build


def number_all(part, first):
    for number, layer in part.layers.items():
        layer.history, layer.recipe = torch.full((4,), first + int(number) / 3), {"margin": first}
    if part.bare is not None:
        part.bare.value = first


def numbers_of(part):
    found = {number: (layer.history[0].item(), layer.recipe["margin"]) for number, layer in part.layers.items()}
    return found | ({} if part.bare is None else {"bare": part.bare.value})


def test_it_follows_modules_to_other_stages_and_comes_back_from_a_checkpoint_of_any_layout(tmp_path):
    def work(world):
        means = {"recorder": (books := Books()), "data_parallel": "free", "mode": "tight"}
        sw = switcher(world, staged(), "pp2", saves=Saves(root=tmp_path), **means)
        number_all(sw.model, 5)
        sw.save_now()
        seen = []
        for target in ("fsdp2", "pp2"):
            sw.request(target)
            until_ended(sw, books)
            seen.append(numbers_of(sw.model))
        number_all(sw.model, 8)
        sw.load(newest(tmp_path)[0])
        seen.append(numbers_of(sw.model))
        sw.close()
        other = switcher(world, staged(), "fsdp2", name="other", **means)
        other.load(newest(tmp_path)[0])
        return books.ends, [*seen, numbers_of(other.model)]

    whole = {str(number): (torch.tensor(5 + number / 3).item(), 5) for number in range(LAYERS)} | {"bare": 5}
    for rank, (ends, seen) in enumerate(everywhere(2, work)):
        assert [end[1] for end in ends] == ["committed"] * 2, ends
        mine = {number: whole[number] for number in (("0", "1", "bare"), ("2", "3"))[rank]}
        assert seen == [whole, mine, mine, whole]


def test_what_cannot_be_read_on_another_stage_and_what_no_module_takes_abort_the_switch_by_name():
    def work(world):
        said = []
        for name, build in (("odd", staged()), ("lost", staged(bare_in=(2,)))):
            sw = switcher(world, build, "pp2", name=name, recorder=(books := Books()), data_parallel="free")
            number_all(sw.model, 5)
            if name == "odd" and world.rank == 1:
                sw.model.layers["2"].recipe = {"margin": Odd()}
            sw.request("fsdp2")
            ((_, outcome, reason),) = until_ended(sw, books)
            said.append((outcome, reason, sw.model.layers[str(2 * world.rank)].history[0].item()))
            sw.close()
        return said

    for rank, ((odd, why_odd, _), (lost, why_lost, kept)) in enumerate(everywhere(2, work)):
        assert (odd, lost) == ("aborted", "aborted")
        assert "the extra state of layers.2 could not be read by another stage" in why_odd
        assert "no module is there for the extra state of bare" in why_lost
        assert kept == torch.tensor(5 + 2 * rank / 3).item()
