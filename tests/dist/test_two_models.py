"""An actor and a critic in one ``Switcher``: one plan, one digest and one decision for both, under one promise."""

import pytest
import torch
import torch.distributed as dist
from tests.dist.foreign import Books, everywhere, idle, until_ended, whole
from tests.dist.test_several_jobs import WEIGHTS, WIDE, model

from dynatrain.execute.promise import Promise
from dynatrain.models.names import strip_wrappers
from dynatrain.train.live import UnplacedTensorError
from dynatrain.train.switcher import Switcher

STEPS = 8
LIMIT = 14 * WEIGHTS
"""On each rank: two models that train hold three times their weights with ``dp2``, half of that with ``fsdp2``; both
are held at once, beside staging: here what one rank sends, and what checksums pass through."""


def build(mesh, layout):  # noqa: ARG001 - the mesh says it all
    parts = [model(mesh, 1), model(mesh, 2)]
    for part, role in zip(parts, ("actor", "critic"), strict=True):
        part.role = role
    return parts, [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in parts]


def by_role(part, path):
    return f"{part.role}.{strip_wrappers(part, path)}"


def made(name, **more):
    return Switcher(build, name=name, layout="fsdp2", names=by_role, deadline=15.0, data_parallel="free", **more)


def train(sw):
    """Losses of a loop whose critic learns what the actor is to do, and all weights at its end."""
    losses = []
    for step in sw.steps(until=STEPS):
        actor, critic = sw.model
        everything = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        mine = everything[dist.get_rank() * 2 :][:2]
        wanted = critic(mine)
        loss = (actor(mine) - wanted.detach()).square().mean() + (wanted - mine[:, :2]).square().mean()
        loss.backward()
        sw.optimizer.step()
        sw.optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: whole(entry.value) for name, entry in sw.world.found.items()}


def test_two_models_move_in_one_plan_under_one_promise_and_train_as_without():
    def work(_world):
        still = made("still")
        expected = train(still)
        still.close()
        promise = Promise(LIMIT)
        sw = made("moves", promise=promise, recorder=(books := Books()), schedule={3: "dp2", 6: "fsdp2"})
        roles = {tensor.name.split(".")[0] for tensor in sw.world.catalogue}
        found = train(sw)
        sw.close()
        return expected, found, books.ends, roles, promise.peak

    for (still, kept), (losses, held), ends, roles, peak in everywhere(2, work):
        assert [end[:2] for end in ends] == [("dp2", "committed"), ("fsdp2", "committed")], ends
        assert roles == {"actor", "critic"}
        assert losses == pytest.approx(still, rel=0, abs=1e-12)
        assert held.keys() == kept.keys()
        assert len(held) == 10
        for name, value in kept.items():
            torch.testing.assert_close(held[name], value, rtol=0, atol=1e-12)
        assert 7 * WEIGHTS < peak <= LIMIT


def test_without_names_that_tell_them_apart_or_without_room_for_both_they_are_refused():
    def work(_world):
        with pytest.raises(UnplacedTensorError) as refused:
            Switcher(build, name="alike", layout="fsdp2", deadline=15.0)
        sw = made("tight", promise=Promise(int(4.2 * WEIGHTS)), recorder=(books := Books()))
        sw.request("dp2", mode="keep")
        until_ended(sw, books)
        for _ in idle(sw, 1):
            pass
        return str(refused.value), books.ends

    for said, ((_, outcome, reason),) in everywhere(2, work):
        assert "two tensors are called 0.weight" in said
        assert "Switcher(names=...)" in said
        assert outcome == "aborted"
        assert f"rank 0 needs {6 * WEIGHTS} bytes more, and the promise of its process leaves" in reason
