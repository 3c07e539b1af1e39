"""What a loop has set since build: found by comparing, carried to the next modules, or refused by name. One process."""

import functools

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
from dynatrain.train.settings import ABSENT, changes, hear, of_the_loop, require_portable, require_takers, tell
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
    job.model.loss, job.model.cache = torch.ones(2, requires_grad=True).sum(), {"keys": 3}

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


def test_plain_tensors_of_a_build_on_meta_are_named_and_parameters_in_lists_are_not():
    with torch.device("meta"):
        lost, kept = Attribute(), nn.LSTM(3, 3)
    with pytest.raises(UnknownStateError, match="freqs: plain tensors of modules"):
        refuse_meta([lost], entries([lost], strip_wrappers))
    refuse_meta([kept], entries([kept], strip_wrappers))
    with pytest.raises(UnknownStateError, match="_flat_weights"):
        refuse_meta([kept], {})  # as where a switch has given the module other parameters and the list was forgotten
