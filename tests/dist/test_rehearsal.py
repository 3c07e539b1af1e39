"""What the first update in a layout would have to find out is found out beside training, before the switch."""

import threading

import torch
from tests.dist.foreign import Books, batch, build_net, everywhere, switcher

from dynatrain.train import preparation, torch_private


class Asked:
    """Operators whose outcome was worked out, by the thread that had to: the training one, or another."""

    def __init__(self):
        self.training, self.beside = [], []
        with torch_private.sharing_decisions():
            decisions = torch_private._propagator().propagate_op_sharding_non_cached
        self._decide, decisions.decide = decisions.decide, self

    def __call__(self, schema):
        main = threading.current_thread() is threading.main_thread()
        (self.training if main else self.beside).append(str(schema.op))
        return self._decide(schema)


def build(mesh, layout, **how):
    net, _ = build_net(mesh, layout)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2, **how)


def updates(world, **how):
    """What the training thread had to work out in the first update of each of three visits, and in the last update."""
    books = Books()
    sw = switcher(world, lambda mesh, layout: build(mesh, layout, **how), "fsdp2", recorder=books, data_parallel="free")
    asked, found, seen = Asked(), [], 0
    for step in sw.steps(until=12):
        if step in {3, 7}:
            sw.request({3: "dp2", 7: "fsdp2"}[step], at=step + 1)
        inputs, targets = batch(step, world.rank)
        (sw.model(inputs) - targets).square().mean().backward()
        before = len(asked.training)
        sw.optimizer.step()
        sw.optimizer.zero_grad()
        if len(books.ends) >= seen or step == 11:  # the first step of a visit, or the last one
            seen += 1
            found.append(asked.training[before:])
    assert [outcome for _, outcome, _ in books.ends] == ["committed"] * 2
    return found, asked.beside


def test_the_first_update_after_a_first_visit_has_nothing_to_find_out():
    for (first, there, back, last), beside in everywhere(2, lambda world: updates(world, foreach=True)):
        assert any("addcdiv" in name for name in first)  # nobody has rehearsed the first layout
        assert (there, back, last) == ([], [], [])
        assert any("addcdiv" in name for name in beside)


def test_one_by_one_there_is_left_what_has_a_number_of_the_step_in_it():
    for (first, there, back, last), _ in everywhere(2, updates):
        assert "aten.lerp_.Scalar" in first
        assert set(there) == {"aten.div.Tensor"}  # by a correction that is another one at each step
        assert (back, last) == ([], [])


def test_without_the_rehearsal_the_training_thread_has_to(monkeypatch):
    monkeypatch.setattr(preparation, "rehearse", lambda _: None)
    for (_, there, *_), _beside in everywhere(2, lambda world: updates(world, foreach=True)):
        assert any("addcdiv" in name for name in there)


def test_what_cannot_be_rehearsed_is_only_slower(monkeypatch):
    def planted(_):
        raise ValueError("planted")

    monkeypatch.setattr("dynatrain.train.rehearsal._without_memory", planted)
    for (_, there, *_), _beside in everywhere(2, lambda world: updates(world, foreach=True)):
        assert any("addcdiv" in name for name in there)
