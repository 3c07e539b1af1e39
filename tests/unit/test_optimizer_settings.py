"""What an optimizer keeps on itself: found by comparing, set on the next one, or refused by name."""

import pytest
import torch
from tests.faces import Counting

from dynatrain.train.optimizer_settings import (
    kept_by,
    optimizer_changes,
    optimizer_settings,
    refuse_meta_tensors,
    require_kept,
    require_movable,
    set_optimizer,
    take_kept,
    unlike_optimizers,
)
from dynatrain.train.optimizers.several import Several
from dynatrain.train.settings import ABSENT
from dynatrain.train.states import UnknownStateError, optimizer_states


def param():
    return torch.nn.Parameter(torch.ones(3))


def stepped(optimizer, steps=2):
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = torch.ones_like(one)
    for _ in range(steps):
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_torchs_own_have_nothing_of_their_own_also_under_a_scheduler_and_hooks(make):
    optimizer = make([param()], lr=0.1)
    built = optimizer_settings(optimizer)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    optimizer.register_step_post_hook(lambda *_: None)
    stepped(optimizer)

    require_movable(built, optimizer)
    assert optimizer_changes(built, optimizer) == {}


def test_numbers_that_it_has_counted_are_found_and_set_on_the_next():
    old, new = Counting([param()]), Counting([param()])
    built, next_built = optimizer_settings(old), optimizer_settings(new)
    stepped(old)
    old.note = "warm"  # a loop's
    changed = optimizer_changes(built, old)
    assert changed == {("optimizer Counting", "t"): (0, 2), ("optimizer Counting", "note"): (ABSENT, "warm")}

    set_optimizer(new, next_built, changed | {("module drop", "p"): (0.1, 0.2)})

    assert (new.t, new.note) == (2, "warm")
    assert optimizer_changes(next_built, new) == changed  # so that the switch after the next has them too
    stepped(new)
    assert new.t == 4


def test_what_a_file_has_of_it_is_set_and_the_rest_is_as_build_made_it():
    old, new = Counting([param()]), Counting([param()])
    built, next_built = optimizer_settings(old), optimizer_settings(new)
    stepped(old)
    kept = kept_by(built, old)
    assert kept == {"optimizer Counting": {"t": 2}}
    stepped(new, 7)
    new.note = "stale"

    take_kept(next_built, new, kept)
    assert new.t == 2
    assert not hasattr(new, "note")
    take_kept(next_built, new, {})
    assert new.t == 0
    assert unlike_optimizers(new, kept) == ()
    (wrong,) = unlike_optimizers(torch.optim.SGD([param()], lr=0.1), kept)
    assert wrong == "it has t of optimizer Counting, which is not here"


def test_each_of_several_is_told_apart():
    several = Several([Counting([param()]), Counting([param()])])
    built = optimizer_settings(several)
    stepped(several.optimizers[1], 3)

    assert kept_by(built, several) == {"optimizer 2 (Counting)": {"t": 3}}
    take_kept(built, several, {"optimizer 1 (Counting)": {"t": 5}})
    assert [one.t for one in several.optimizers] == [5, 0]


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.seen.append(3),
        lambda one: setattr(one, "seen", None),
        lambda one: setattr(one, "late", {}),
        lambda one: one.scale.mul_(2),
        lambda one: setattr(one, "scale", torch.ones(())),
    ],
)
def test_what_is_not_plain_and_has_changed_is_refused_by_name(change):
    optimizer = Counting([param()])
    optimizer.seen, optimizer.scale, optimizer.params = [1], torch.ones(()), [param()]
    built = optimizer_settings(optimizer)
    optimizer.seen, optimizer.params = [1], [param()]  # equal ones
    stepped(optimizer)
    require_movable(built, optimizer)

    change(optimizer)

    with pytest.raises(UnknownStateError, match=r"(seen|late|scale) of optimizer Counting: changed .*self\.t"):
        require_kept(built, optimizer)


def test_a_type_stays_out_of_files_and_a_build_that_sets_otherwise_is_refused():
    optimizer, other = Counting([param()]), Counting([param()])
    built = optimizer_settings(optimizer)
    optimizer.kind = torch.float64
    with pytest.raises(UnknownStateError, match="kind of optimizer Counting: set since build"):
        require_kept(built, optimizer)
    other.t = 7
    with pytest.raises(UnknownStateError, match=r"t of optimizer Counting was set to 2 since build.*and 7 in the next"):
        set_optimizer(other, optimizer_settings(other), {("optimizer Counting", "t"): (0, 2)})


def test_tensors_on_an_optimizer_that_is_built_on_meta_are_named():
    with torch.device("meta"):
        optimizer = Counting([param()])
        refuse_meta_tensors(optimizer)
        optimizer.params = [param()]  # the model's
        refuse_meta_tensors(optimizer)
        optimizer.sums = {"a": [torch.zeros(3)]}
    with pytest.raises(UnknownStateError, match="sums of optimizer Counting: tensors on an optimizer itself"):
        refuse_meta_tensors(optimizer)


def test_state_of_no_parameter_is_refused_with_what_to_do():
    one = param()
    optimizer = torch.optim.SGD([one], lr=0.1)
    optimizer.state["global_step"] = 5
    optimizer.state[7] = {"sum": torch.ones(2)}
    optimizer.state[one] = 3

    with pytest.raises(UnknownStateError) as refusal:
        optimizer_states(optimizer, {})
    for said in (
        "has 'global_step' (int), which belongs to no parameter",
        "has 7 (dict)",
        "self.t = 0",
        "is int; it is",
    ):
        assert said in str(refusal.value)
