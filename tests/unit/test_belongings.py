"""What registered objects hold of one layout is refused by name, and retired handles raise. One process, no ranks."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from dynatrain.layout.text import parse_layout
from dynatrain.models.names import strip_wrappers
from dynatrain.train.belongings import Belongings, held
from dynatrain.train.first import join
from dynatrain.train.live import entries
from dynatrain.train.optimizers.several import Several
from dynatrain.train.registered import made_anew
from dynatrain.train.retire import RetiredHandleError, retire
from dynatrain.train.stand_ins import _Edges, _Optimizer
from dynatrain.train.states import UnknownStateError, create_optimizer_state
from dynatrain.train.world import World


class Cosine:
    """A scheduler that is none of torch's, as timm's are: writes a rate into each group, and has plain state."""

    def __init__(self, optimizer):
        self.optimizer, self.base, self.seen = optimizer, [group["lr"] for group in optimizer.param_groups], 0
        self.write()

    def write(self):
        for base, group in zip(self.base, self.optimizer.param_groups, strict=True):
            group["lr"] = base / (1 + self.seen)

    def step(self):
        self.seen += 1
        self.write()

    def state_dict(self):
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state):
        vars(self).update(state)


class Whole(Cosine):
    def state_dict(self):
        return dict(vars(self))


class Holding:
    """Has state, and whatever it is given besides."""

    def __init__(self, thing):
        self.thing, self.count = thing, 3

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Slotted:
    __slots__ = ("thing",)

    def __init__(self, thing):
        self.thing = thing


class Average(Holding):
    """An average that begins with the parameters' own tensors, and gives them up for what it is given."""

    def __init__(self, model, **more):
        super().__init__(more)
        self.shadow = dict(model.named_parameters())

    def state_dict(self):
        return super().state_dict() | {"shadow": self.shadow}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.shadow = state["shadow"]


def make(several=False):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    if several:
        optimizer = Several([torch.optim.AdamW(one.parameters()) for one in model])
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    create_optimizer_state(optimizer)
    return World(parse_layout("dp1"), None, [model], optimizer, entries([model], strip_wrappers))


def refusal(world, thing, label="thing"):
    with pytest.raises(UnknownStateError) as caught:
        join(SimpleNamespace(factories={}), world, label, thing)
    assert label not in world.objects
    return str(caught.value)


@pytest.mark.parametrize("several", [False, True])
def test_a_scheduler_that_is_none_of_torchs_needs_a_factory(several):
    world = make(several)
    said = refusal(world, Cosine(world.optimizer), "lr")
    assert "lr holds the optimizer (optimizer)" in said
    assert "give a factory, state={'lr': lambda optimizer: ...}" in said

    party = SimpleNamespace(factories={})
    join(party, world, "lr", Cosine)
    assert party.factories == {"lr": Cosine}


def held_ones(world):
    model, optimizer = world.parts[0], world.optimizer
    group = optimizer.param_groups[0]
    return {
        "parameter group 0 (thing)": group,
        "parameter group 0 (thing[0])": optimizer.param_groups,
        "parameter group 0 (thing['rates'][0])": {"rates": (group,)},
        "the optimizer (thing.__self__)": optimizer.zero_grad,
        "the optimizer (thing.args[0])": partial(print, optimizer),
        "the optimizer (thing.optimizer)": LambdaLR(optimizer, lambda _: 1.0),
        "the optimizer (thing.thing.thing)": Slotted(Holding(optimizer)),
        "module (the model) (thing)": model,
        "module 1 (thing[...])": {model[1]: 0.9},
        "0.weight (thing[0])": list(model.parameters()),
        "a view of 1.bias (thing)": model[1].bias.detach()[1:],
        "the Switcher's world (thing)": world,
    }


@pytest.mark.parametrize("words", held_ones(make()))
def test_what_an_object_holds_of_a_layout_is_named_wherever_it_is(words):
    world = make()
    assert f"thing holds {words}" in refusal(world, Holding(held_ones(world)[words]))


def test_what_is_renewed_or_is_not_of_the_layout_is_let_pass():
    world, party = make(), SimpleNamespace(factories={})
    model = world.parts[0]
    sw = SimpleNamespace(steps=lambda until: iter(range(until)), optimizer=world.optimizer)
    follows = _Optimizer(lambda: sw.optimizer, _Edges(sw))  # a stand-in, which asks for the optimizer of the moment
    of_its_own = {"teacher": copy.deepcopy(model), "scaler": torch.amp.GradScaler("cpu"), "optimizer": follows}

    for label, thing in {"average": Average(model, **of_its_own), "plain": Holding([1, "a", None])}.items():
        join(party, world, label, thing)

    assert world.objects.keys() == {"average", "plain"}


def test_a_great_data_set_costs_no_walk_through_all_of_it():
    world = make()
    items = [[number] for number in range(300_000)]
    belongings = Belongings(world, views=True)
    assert held(Holding([items, world.optimizer]), belongings) == {"the optimizer": "thing[1]"}
    assert held(Holding([items, [[world.optimizer]]]), belongings) == {}  # not looked at any more


def test_a_state_dict_that_has_the_optimizer_in_it_is_refused_of_objects_and_of_factories():
    world = make()
    for thing in (Whole(world.optimizer), Whole):
        assert "state dict" in (said := refusal(world, thing, "lr"))
        assert "the optimizer (['optimizer'])" in said


def test_a_factorys_product_that_holds_modules_or_what_is_old_is_refused():
    world, other = make(), make()
    model = world.parts[0]
    assert "product holds module 0 (thing)" in refusal(world, lambda _: Holding(model[0]))

    def forgets(_):
        return Cosine(world.optimizer)

    world.optimizer.param_groups[0]["lr"] = 0.25
    world.objects["lr"] = forgets(None)
    world.objects["lr"].step()
    before = dict(world.optimizer.param_groups[0])
    with pytest.raises(UnknownStateError, match=r"lr: its factory made one that holds the optimizer \(optimizer\) of"):
        made_anew({"lr": lambda old: [forgets(old).step(), forgets(old)][1]}, world, other)
    assert dict(world.optimizer.param_groups[0]) == before
    assert made_anew({"lr": Cosine}, world, other)["lr"].optimizer is other.optimizer


@pytest.mark.parametrize("several", [False, True])
def test_all_that_a_retired_handle_could_be_used_for_raises_with_its_name(several):
    world, new = make(several), make(several)
    model, optimizer, lr = world.parts[0], world.optimizer, Cosine(world.optimizer)
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    inner = optimizer.optimizers[0] if several else optimizer
    retire([model], optimizer, {"lr": lr}, world.found, {}, "is of another layout")

    def write(where):
        where["lr"] = 0.1

    def scale():
        group["lr"] *= 0.5

    uses = [
        ("module 1", model[1].train),
        ("model part 0", model.eval),
        ("model part 0", model.state_dict),
        ("model part 0", lambda: model.load_state_dict({})),
        ("model part 0", model.zero_grad),
        ("module 0", lambda: model[0].requires_grad_(requires_grad=False)),
        ("the optimizer", optimizer.state_dict),
        ("the optimizer", optimizer.zero_grad),
        ("the optimizer", lambda: inner.load_state_dict({})),
        ("the optimizer", lambda: optimizer.add_param_group({"params": []})),
        ("the optimizer", lambda: write(optimizer.param_groups[0])),
        ("the optimizer", lambda: write(inner.param_groups[0])),
        ("the optimizer", lambda: list(optimizer.param_groups)),
        ("the optimizer", lambda: len(optimizer.param_groups)),
        ("the optimizer", lambda: write(groups[0])),
        ("the optimizer", lambda: [write(one) for one in groups]),
        ("the optimizer", scale),
        ("the optimizer", lambda: f"{group['lr']:.3f}"),
        ("the optimizer", lambda: max(group["lr"], 0.1)),
        ("the optimizer", lambda: group["lr"].item() + 1),
        ("lr", lr.step),
        ("lr", lr.state_dict),
    ]
    for name, use in uses:
        with pytest.raises(
            RetiredHandleError, match=rf"{name} .*is of another layout; take it from the Switcher again"
        ):
            use()
    assert "retired" in repr(groups)  # what a debugger shows
    assert isinstance(copy.copy(model), nn.Module)
    Cosine(new.optimizer).step()
    new.parts[0].train().state_dict()
