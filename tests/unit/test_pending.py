"""Whether gradients wait for an update: what shows it, and what ends it."""

import inspect

import torch
from torch import nn

from dynatrain.train.optimizers.several import Several
from dynatrain.train.pending import Pending
from dynatrain.train.updates import follow


class Two(nn.Module):
    """An encoder and a head that a loop calls apart, and a scale of the model's own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.head(self.encoder(x)).sum()

    def score(self, x):
        return (x * self.scale).sum()


def followed(optimizer=torch.optim.SGD, **options):
    model = Two()
    chosen = optimizer(model.parameters(), **{"lr": 0.1} | options)
    pending = Pending([model], chosen)
    follow(chosen, pending, lambda make: make())
    return model, chosen, pending


X = torch.ones(2, 3)


def test_gradients_wait_wherever_they_come_from_until_their_update():
    ways = {
        "the model": lambda model: model(X),
        "its modules, each called apart": lambda model: model.head(model.encoder(X)).sum(),
        "a method with parameters of its own": lambda model: model.score(X),
    }
    for name, way in ways.items():
        model, optimizer, pending = followed()
        for _ in range(2):  # the second time gradients of the update before are there still
            assert not pending.waits, name
            way(model).backward()
            assert pending.waits, name
            optimizer.step()
            assert not pending.waits, name
            way(model).backward()
            assert pending.waits, name
            optimizer.step()


def test_what_an_update_has_used_waits_no_more_and_nor_does_what_is_set_to_zero():
    model, optimizer, pending = followed()
    model.score(X).backward()
    optimizer.step()
    model.zero_grad(set_to_none=False)
    assert not pending.waits
    model.score(X).backward()
    assert pending.waits
    optimizer.zero_grad(set_to_none=False)
    assert not pending.waits


def test_a_closure_runs_forward_inside_the_update():
    model, optimizer, pending = followed(torch.optim.LBFGS)

    def closure():
        optimizer.zero_grad()
        loss = model(X).square()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert not pending.waits


def test_what_a_skipped_update_would_have_used_is_dropped_by_zero_grad():
    model, optimizer, pending = followed()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    updates = []
    optimizer.register_step_post_hook(lambda *_: updates.append(1))
    for factor, made in ((float("inf"), 0), (1.0, 1)):
        scaler.scale(model(X) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert not pending.waits
        assert len(updates) == made


def test_gradients_that_come_behind_zero_grad_wait_whose_forward_was_before_it():
    model, optimizer, pending = followed()
    loss = model(X)
    optimizer.zero_grad()
    loss.backward()
    assert pending.waits


def test_what_is_not_trained_never_waits():
    pending = Pending([model := Two()], Several([]))
    model(X).backward()
    assert not pending.waits


def test_signatures_stay_what_loops_look_at():
    _, optimizer, _ = followed()
    assert "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
    assert "closure" in inspect.signature(optimizer.step).parameters
