"""What a loop has set since build: found by comparing, carried to the next modules, or refused by name. One process."""

import copy
import enum
import fractions
import functools
import json
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.faces import (
    DATA,
    Attribute,
    build_with,
    facts,
    hook_the_reduction,
    nothing,
    put_a_main_grad,
    put_a_tensor,
    set_up,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

from dynatrain.layout.text import parse_layout
from dynatrain.models.names import strip_wrappers
from dynatrain.space.ownership import Ownership, Placement
from dynatrain.space.tensor import Tensor
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.live import entries
from dynatrain.train.module_settings import apply, refuse_meta, settings_of
from dynatrain.train.plain import hear as hear_plain
from dynatrain.train.settings import (
    ABSENT,
    changes,
    hear,
    not_shared,
    of_the_loop,
    require_portable,
    require_takers,
    tell,
)
from dynatrain.train.states import UnknownStateError


class Job:
    """Modules as one build makes them, and their settings right after it."""

    def __init__(self, change=nothing):
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=DATA)
        self.model, _ = build_with(change)(mesh, None)
        self.found = entries([self.model], strip_wrappers)
        self.built = self.now

    @property
    def now(self):
        return settings_of([self.model], self.found, strip_wrappers)

    @property
    def changed(self):
        return changes(self.built, self.now)

    def take(self, changed):
        apply([self.model], self.found, strip_wrappers, self.built, changed)


@pytest.fixture(autouse=True)
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_nothing_has_changed_behind_build_and_a_step_changes_only_what_the_model_writes_itself():
    job = Job()
    assert job.changed == {}

    job.model(torch.ones(2, 6)).sum().backward()
    job.model.reshard()

    assert job.changed == {("module (the model)", "ready"): (False, True)}


def test_all_that_was_set_is_found_and_is_set_on_the_next_modules():
    old, new = Job(), Job()
    set_up(old.model)
    assert facts(old) != facts(Job(set_note))

    new.take(old.changed)

    plain = [{key: value for key, value in facts(job).items() if key != "buffers"} for job in (old, new)]
    assert plain[0] == plain[1]
    assert new.now["FSDP unit (the model)", "gradient_divide_factor"] == 1.0
    assert new.now["FSDP unit (the model)", "reshard_after_forward"] is False
    assert new.changed == old.changed  # so that the switch after the next has them too


def set_note(net, _layout):
    net.note, net.inside.mark = "", 0


def test_a_setting_that_was_taken_away_is_taken_away():
    old, new = Job(set_note), Job(set_note)
    del old.model.note

    new.take(old.changed)

    assert not hasattr(new.model, "note")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (put_a_tensor, "seen of module inside is a tensor"),
        (lambda net: setattr(net, "forward", functools.partial(net.forward)), "forward of module .* to partial"),
        (put_a_main_grad, "main_grad of parameter out.weight is a tensor"),
        (hook_the_reduction, "all_reduce_hook of FSDP unit"),
        (lambda net: setattr(net.out.bias, "owner", net), "owner of parameter out.bias was set since build"),
    ],
)
def test_what_could_be_carried_nowhere_is_named(act, words):
    job = Job()
    act(job.model)
    with pytest.raises(UnknownStateError, match=words):
        _ = job.changed


def test_results_of_a_forward_and_caches_are_made_anew():
    job = Job()
    job.model.loss, job.model.cache = torch.ones(2, requires_grad=True).sum(), {"keys": torch.ones(2)}
    job.model.note, job.model.table = Config(), list(range(1000))

    assert job.changed == {}


class Config:
    """As a model's config is: of plain values; all modules hold the same one."""

    def __init__(self):
        self.aux, self.layers, self.kind, self.note = False, [1, 2], Kind.GIVEN, None


class Kind(enum.Enum):
    GIVEN, TAKEN = 1, 2


class Frozen:
    """An object of plain values that nobody writes behind its construction."""

    def __init__(self, p=0.1):
        vars(self)["p"] = p

    def __setattr__(self, name, value):
        raise AttributeError(f"cannot assign to {name}")


def give_a_config(net, _layout):
    net.config = net.inside.config = net.out.config = Config()
    net.frozen_config = Frozen()
    net.sizes, net.kind, net.rates, net.marks = (1, 1), Kind.GIVEN, [0.1, [0.2]], {"a": (1, {2})}
    net.inside.weight.dims = (0,)


@pytest.mark.parametrize(
    "act",
    [
        lambda net: setattr(net.drop, "p", np.float64(0.5)),
        lambda net: setattr(net.drop, "p", fractions.Fraction(1, 2)),
        lambda net: setattr(net, "ready", np.bool_(True)),
        lambda net: setattr(net, "ready", np.int64(3)),
        lambda net: setattr(net, "sizes", (2, 2)),
        lambda net: setattr(net, "sizes", torch.Size([2, 2])),
        lambda net: setattr(net, "kind", Kind.TAKEN),
        lambda net: net.rates[1].append(0.3),
        lambda net: net.marks.update(b=1),
        lambda net: setattr(net, "late", {"new": [1]}),
        lambda net: setattr(net.inside.weight, "dims", (0, 1)),
        lambda net: setattr(net.config, "aux", True),
        lambda net: net.inside.config.layers.append(3),
        lambda net: setattr(net.config, "kind", Kind.TAKEN),
        lambda net: setattr(net.config, "new", 5),
        lambda net: delattr(net.config, "note"),
        lambda net: setattr(net.out, "config", Config()),  # its own from now on, and equal: nothing to carry
    ],
)
def test_numbers_of_any_kind_members_containers_and_what_configs_are_set_to_go_along(act):
    old, new, other = (Job(give_a_config) for _ in range(3))
    act(old.model)
    before, alike = settled(old.model), settled(old.model) == settled(other.model)
    assert (old.changed == {}) is alike

    require_takers(old.changed, new.built, travels=False)
    new.take(old.changed)

    assert settled(new.model) == before
    assert settled(other.model) != before or alike
    assert new.changed.keys() == old.changed.keys()
    assert new.model.config is new.model.inside.config
    new.model.rates[1].append(0.9)
    new.model.config.layers.append(9)
    assert settled(old.model) == before  # nothing written is shared


def settled(net):
    values = [vars(net.config), net.drop.p, net.ready, net.sizes, net.kind, net.rates, net.marks, vars(net.out.config)]
    return copy.deepcopy([*values, getattr(net, "late", None), net.inside.weight.dims])


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda net: setattr(net.drop, "p", object()), "p of module drop was set since build, to what cannot be carr"),
        (lambda net: setattr(net.drop, "p", Config()), "p of module drop was set since build, to Config: set it in"),
        (lambda net: setattr(net.drop, "p", np.array(0.5)), "p of module drop was set since build, to what cannot"),
        (lambda net: setattr(net, "sizes", [object()]), "sizes of module .* was set since build, to what cannot"),
        (lambda net: setattr(net.config, "aux", object()), "config.aux of module .* was set since build, to what"),
        (lambda net: setattr(net, "config", Frozen()), "config of module .* was set since build, to Frozen"),
    ],
)
def test_what_was_plain_and_cannot_be_carried_any_more_is_named_once(act, words):
    job = Job(give_a_config)
    act(job.model)
    with pytest.raises(UnknownStateError, match=words) as caught:
        _ = job.changed
    assert str(caught.value).count("since build") == 1


def test_an_object_that_takes_no_value_and_one_that_is_not_there_are_named():
    old, new, other = Job(give_a_config), Job(give_a_config), Job()
    old.model.frozen_config = Frozen(0.5)
    assert old.changed == {("module (the model)", "frozen_config.p"): (0.1, 0.5)}
    with pytest.raises(UnknownStateError, match=r"frozen_config\.p was set since build, and the next Frozen"):
        new.take(old.changed)
    with pytest.raises(UnknownStateError, match=r"frozen_config\.p of module .* was set to 0\.5 .* no such obj"):
        require_takers(old.changed, other.built | {("module (the model)", "frozen_config"): None}, travels=True)


def test_an_object_that_all_layouts_share_and_one_that_keeps_tensors_are_left_alone():
    shared = Config()

    def share(net, _layout):
        net.shared, net.cache = shared, Config()

    old = Job(share)
    old.model.shared.aux, old.model.cache.aux, old.model.cache.keys = True, True, [torch.ones(2)]
    new = Job(share)
    shared.note = 7

    assert old.changed == {
        ("module (the model)", "shared.aux"): (False, True),
        ("module (the model)", "shared.note"): (None, 7),
    }
    assert not_shared(old.changed, old.now, new.built) == {}
    assert not_shared(old.changed, old.now, Job(give_a_config).built) == old.changed


def test_what_travels_is_told_as_json_has_it_and_what_cannot_be_is_refused():
    job = Job(give_a_config)
    net = job.model
    net.drop.p, net.sizes, net.rates, net.config.aux = np.float64(0.5), (2, (3,)), [{"a": {1}}, None], True
    text = json.dumps(tell(job.changed))
    told = {(whose, which): (hear_plain(was), hear_plain(now)) for whose, which, was, now in json.loads(text)}
    assert told == job.changed
    assert type(told["module drop", "p"][1]) is float
    assert len([key for key in told if key[1] == "config.aux"]) == 3  # of each module that holds it
    require_portable(job.changed)

    net.kind = Kind.TAKEN
    with pytest.raises(UnknownStateError, match=r"kind of module \(the model\): set since build to what cannot follow"):
        require_portable(job.changed)


def test_a_random_stream_in_an_attribute_is_not_taken_for_its_attributes():
    def draw(net, _layout):
        net.stream = random.Random(3)

    job = Job(draw)
    job.model.stream.gauss(0, 1)  # keeps the second of a pair in an attribute
    assert job.changed == {}


def test_types_stay_on_their_rank_and_are_refused_where_modules_travel():
    job = Job()
    job.model.act = nn.GELU

    with pytest.raises(UnknownStateError, match="act of module"):
        require_portable(job.changed)
    new = Job()
    new.take(job.changed)
    assert new.model.act is job.model.act


def test_what_the_next_build_has_not_or_sets_otherwise_is_refused():
    key = ("module blocks.9", "p")
    with pytest.raises(UnknownStateError, match=r"next layout has no module blocks\.9"):
        require_takers({key: (0.1, 0.5)}, {}, travels=False)
    require_takers({key: (0.1, 0.5)}, {}, travels=True)  # another rank may have it
    with pytest.raises(UnknownStateError, match=r"makes it 0\.1 in this layout and 0\.2"):
        require_takers({key: (0.1, 0.5)}, {key: 0.2}, travels=True)
    require_takers({key: (0.1, 0.2)}, {key: 0.2}, travels=True)  # as the next build has it
    require_takers({key: (0.1, 0.5)}, {key: np.float64(0.1)}, travels=True)  # told by another rank as Python's


def test_what_schedules_of_a_pipeline_set_is_not_the_loops():
    job = Job()
    job.model.set_requires_gradient_sync(False)
    job.model.set_gradient_divide_factor(1.0)
    job.model.eval()

    assert {which for _, which in of_the_loop(job.changed)} == {"gradient_divide_factor", "training"}


LAYOUT = parse_layout("pp2.dp2")
CATALOGUE = (Tensor("out.weight", (4,), (), (), (), "out"),)
OWNERSHIP = Ownership(LAYOUT, {"out.weight": Placement((), (1,))})  # ranks 2 and 3


def heard(told, mine=None, *, travels=True):
    return hear([tell(one) for one in told], mine or {}, CATALOGUE, OWNERSHIP, travels=travels)


def test_what_travels_is_told_to_ranks_that_get_the_module():
    drop = {("module drop", "p"): (0.1, 0.5)}
    assert heard([{}, {}, drop, drop]) == drop
    assert heard([{}, {}, drop, drop], travels=False) == {}
    assert heard([{("module a", "x"): (ABSENT, True)}, {}, {}, {}]) == {("module a", "x"): (ABSENT, True)}


def test_ranks_that_disagree_are_named():
    frozen = {("parameter out.weight", "requires_grad"): (True, False)}
    with pytest.raises(SwitchAbortedError, match=r"requires_grad of parameter out\.weight .* ranks \[3\] differ"):
        heard([{}, {}, frozen, {}], travels=False)
    assert heard([{}, {}, frozen, frozen], frozen, travels=False) == frozen
    counts = [{("module a", "seen"): (0, number)} for number in (1, 1, 1, 2)]
    with pytest.raises(SwitchAbortedError, match=r"seen of module a .* ranks \[3\] differ"):
        heard(counts)
    assert heard(counts, counts[3], travels=False) == counts[3]


def test_wrappers_hide_no_module_and_take_no_setting():
    def wrapped():
        net = nn.Sequential(checkpoint_wrapper(nn.Dropout(0.1)))
        return net, entries([net], strip_wrappers)

    (old, found), (new, others) = wrapped(), wrapped()
    built = settings_of([old], found, strip_wrappers)
    old[0]._checkpoint_wrapped_module.p = 0.5
    old.eval()
    changed = changes(built, settings_of([old], found, strip_wrappers))
    apply([new], others, strip_wrappers, built, changed)

    assert changed["module 0", "p"] == (0.1, 0.5)
    assert new[0]._checkpoint_wrapped_module.p == 0.5
    assert "p" not in vars(new[0])
    assert not any(module.training for module in new.modules())


class Scaled(nn.Linear):
    """Its tensor is its extra state's."""

    def __init__(self):
        super().__init__(3, 3)
        self.scale = torch.ones(3)

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def test_tensors_of_modules_with_extra_state_are_handed_over_by_that():
    with torch.device("meta"):
        net = Scaled()
    refuse_meta([net], entries([net], strip_wrappers))
    net = Scaled()
    built = settings_of([net], {}, strip_wrappers)
    net.scale = net.scale * 2
    assert changes(built, settings_of([net], {}, strip_wrappers)) == {}


def test_plain_tensors_of_a_build_on_meta_are_named_and_parameters_in_lists_are_not():
    with torch.device("meta"):
        lost, kept = Attribute(), nn.LSTM(3, 3)
    with pytest.raises(UnknownStateError, match="freqs: plain tensors of modules"):
        refuse_meta([lost], entries([lost], strip_wrappers))
    refuse_meta([kept], entries([kept], strip_wrappers))
    with pytest.raises(UnknownStateError, match="_flat_weights"):
        refuse_meta([kept], {})  # as where a switch has given the module other parameters and the list was forgotten
