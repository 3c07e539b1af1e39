"""Stand-ins pass everything on to the layout of the moment, and find the edges between steps by themselves."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import dynatrain
from dynatrain.train.stand_ins import StandInError


def layout():
    """What one layout binds."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


class Job:
    """As a Switcher, whose every step is in another layout; ``last`` ends it."""

    def __init__(self, last=10, *, left=False, saved=True):
        self.edges, self.last, self.left, self.step = [], last, left, last
        self.saved = last if saved else -1
        self._bind()

    def _bind(self):
        self.model, self.optimizer, scheduler = layout()
        self.parts, self.state = [self.model], {"lr": scheduler}

    def steps(self, until):
        for step in range(min(until, self.last)):
            if step:
                self._bind()
            self.edges.append(step)
            yield step


def test_they_are_of_the_kinds_that_frameworks_ask_for_and_stand_for_what_is_there_now():
    job = Job()
    model, optimizer, scheduler = dynatrain.stand_ins(job, "lr")
    kinds = nn.Module, torch.optim.Optimizer, LRScheduler
    assert [isinstance(*pair) for pair in zip((model, optimizer, scheduler), kinds, strict=True)] == [True] * 3
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight is job.model.weight
        assert list(model.parameters()) == list(job.model.parameters())
        assert optimizer.param_groups is job.optimizer.param_groups
        assert scheduler.get_last_lr() == job.state["lr"].get_last_lr()
        model.eval()
        model.note = 3
        assert (job.model.training, job.model.note) == (False, 3)
        del model.note
        assert not hasattr(job.model, "note")
        before = job.model.weight.detach().clone()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert not torch.equal(before, job.model.weight)
        assert job.model.weight.grad is None
        assert job.state["lr"].last_epoch == 1
    assert "Linear" in repr(model)


def test_an_edge_is_taken_before_the_first_forward_with_gradients_behind_an_update():
    job, x = Job(), torch.ones(1, 2)
    model, optimizer = dynatrain.stand_ins(job)
    with torch.no_grad():
        model(x)
    assert job.edges == []
    for step in range(3):
        model(x).sum().backward()
        assert job.edges == list(range(step + 1))
        model(x).sum().backward()  # the second micro-batch
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)  # a validation
        assert job.edges == list(range(step + 1))


@pytest.mark.parametrize(("left", "saved", "code"), [(False, True, 75), (False, False, 143), (True, False, 0)])
def test_a_job_without_further_steps_ends_its_process_with_the_code_that_says_why(left, saved, code):
    model, optimizer = dynatrain.stand_ins(Job(last=1, left=left, saved=saved))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    with pytest.raises(SystemExit) as ended:
        model(torch.ones(1, 2))
    assert ended.value.code == code


def test_what_there_is_nothing_to_stand_in_for_is_refused_by_name():
    job = SimpleNamespace(state={"ema": 1}, parts=[1, 2])

    with pytest.raises(StandInError, match=r"no 'lr'; it has \['ema'\].*2 modules"):
        dynatrain.stand_ins(job, "lr")
