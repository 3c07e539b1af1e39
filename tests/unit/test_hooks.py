"""Hooks that hang on what a switch makes anew: bound to its namesake, or refused by name. One process, no ranks."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper

from dynatrain.train.hooks import UnknownHookError, built_hooks, carry_hooks


class Counting(nn.Linear):
    """Counts, in an attribute, how often its hook ran."""

    def __init__(self):
        super().__init__(2, 2)
        self.calls = 0

    def count(self, *_):
        self.calls += 1


def world(wrap=lambda module: module, **objects):
    model = nn.Sequential(wrap(Counting()), Counting())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = built_hooks([model], optimizer)
    return SimpleNamespace(parts=[model], optimizer=optimizer, built_hooks=hooks, objects=objects)


def run(here):
    here.parts[0](torch.ones(1, 2)).sum().backward()
    here.optimizer.step()


def test_a_method_of_a_module_is_bound_to_its_namesake():
    old, new = world(), world()
    first, last = old.parts[0]
    last.register_forward_hook(last.count)  # its own
    last.register_forward_hook(partial(first.count, "of another"))
    last.register_forward_pre_hook(partial(Counting.count, first))
    old.optimizer.register_step_post_hook(last.count)

    carry_hooks(old, new)
    run(new)

    assert [module.calls for module in (*old.parts[0], *new.parts[0])] == [0, 0, 2, 2]


def test_a_method_of_the_optimizer_and_of_what_a_factory_made_are_bound_to_the_new_ones():
    class Rate:
        def __init__(self):
            self.calls = 0

        def count(self, *_):
            self.calls += 1

    old, new = world(lr=Rate()), world(lr=Rate())
    old.optimizer.register_step_post_hook(old.objects["lr"].count)
    old.parts[0].register_forward_pre_hook(partial(zero, old.optimizer))
    new.optimizer.register_step_post_hook(new.objects["lr"].count)  # as the factory does each time
    new.parts[0][0].weight.grad = torch.ones(2, 2)

    carry_hooks(old, new)
    new.parts[0](torch.ones(1, 2))
    assert new.parts[0][0].weight.grad is None
    run(new)

    assert (old.objects["lr"].calls, new.objects["lr"].calls) == (0, 1)


def zero(optimizer, *_):
    optimizer.zero_grad()


def test_methods_of_objects_of_the_users_stay_as_they_are():
    counter = Counting()  # a module, but not of the model
    old, new = world(mine=counter), world(mine=counter)
    old.parts[0].register_forward_hook(counter.count)
    old.parts[0].register_forward_hook(partial(counter.count))

    carry_hooks(old, new)
    run(new)

    assert counter.calls == 2


class Wrapping(CheckpointWrapper):
    calls = 0

    def count(self, *_):
        self.calls += 1


def test_a_method_of_a_wrapper_goes_to_the_wrapper():
    old, new = world(Wrapping), world(Wrapping)
    old.parts[0][1].register_forward_hook(old.parts[0][0].count)

    carry_hooks(old, new)
    run(new)

    assert [
        vars(one).get("calls") for one in (old.parts[0][0], new.parts[0][0], new.parts[0][0]._checkpoint_wrapped_module)
    ] == [None, 1, 0]


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_wrapper_is_not_taken_for_what_is_in_it(wrapped):
    worlds = world(checkpoint_wrapper), world()
    old, new = worlds if wrapped else worlds[::-1]
    inside = [getattr(one.parts[0][0], "_checkpoint_wrapped_module", one.parts[0][0]) for one in (old, new)]
    old.parts[0][1].register_forward_hook(inside[0].count)

    carry_hooks(old, new)
    run(new)

    assert [module.calls for module in inside] == [0, 1]


def test_a_method_of_a_module_without_a_namesake_and_a_module_that_is_gone_are_named():
    old, new = world(), world()
    del new.parts[0][1]
    old.parts[0][0].register_forward_hook(old.parts[0][1].count)
    old.parts[0][1].register_forward_hook(zero)

    with pytest.raises(UnknownHookError) as caught:
        carry_hooks(old, new)

    assert "Counting.count (forward_hooks) on module 0 is bound to module 1, which the next layout has not" in str(
        caught.value
    )
    assert "zero (forward_hooks) on module 1: the next layout has no module 1" in str(caught.value)
