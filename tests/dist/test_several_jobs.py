"""An actor, a critic and a reference in the same processes: each switches alone, and all keep one promise of memory."""

import pytest
import torch
import torch.distributed as dist
from tests.dist.foreign import Books, everywhere
from torch import nn
from torch.distributed.fsdp import fully_shard

from dynatrain.execute.promise import Promise, PromiseError
from dynatrain.layout.text import print_layout
from dynatrain.train.standing import NameTakenError
from dynatrain.train.switcher import Switcher
from dynatrain.train.torch_private import local_tensor

STEPS = 28
WIDE = 96
WEIGHTS = 8 * (WIDE * WIDE + WIDE + WIDE * WIDE + 2 * WIDE + 2)  # bytes of one model


def model(mesh, seed):
    made = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, 2)).double()
    generator = torch.Generator().manual_seed(seed)
    if not next(made.parameters()).is_meta:
        with torch.no_grad():
            for param in made.parameters():
                param.copy_(torch.randn(param.shape, generator=generator, dtype=param.dtype) / 8)
    for layer in made:
        fully_shard(layer, mesh=mesh["dp", "fsdp"])
    return fully_shard(made, mesh=mesh["dp", "fsdp"])


def trained(seed):
    def build(mesh, layout):  # noqa: ARG001 - the mesh says it all
        made = model(mesh, seed)
        return made, torch.optim.AdamW(made.parameters(), lr=1e-2)

    return build


def reference(mesh, layout):  # noqa: ARG001 - the mesh says it all
    return model(mesh, 3), None


def values(sw):
    return {name: entry.value.full_tensor().clone() for name, entry in sw.world.found.items()}


def train(prefix, promise, asked):
    """Three jobs in one loop; ``asked[step]`` is ``(job, layout, mode)`` of what is asked for there."""
    books, jobs = {}, {}
    for name, build in (("actor", trained(1)), ("critic", trained(2)), ("reference", reference)):
        books[name] = Books()
        more = {"promise": promise, "recorder": books[name], "deadline": 15.0, "data_parallel": "free"}
        jobs[name] = Switcher(build, name=f"{prefix}-{name}", layout="fsdp2", **more)
    losses, layouts = [], []
    loops = (sw.steps(until=STEPS) for sw in jobs.values())
    for step, *others in zip(*loops, strict=True):
        assert others == [step, step]
        everything = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        mine = everything[dist.get_rank() * 2 :][:2]
        with torch.no_grad():
            wanted = jobs["reference"].model(mine)
        for name in ("actor", "critic"):
            loss = (jobs[name].model(mine) - wanted).square().mean()
            loss.backward()
            jobs[name].optimizer.step()
            jobs[name].optimizer.zero_grad()
            losses.append(loss.item())
        layouts.append(tuple(print_layout(sw.layout) for sw in jobs.values()))
        for name, layout, mode in asked.get(step, ()):
            jobs[name].request(layout, mode=mode)
        for sw in jobs.values():
            if (attempt := sw._course._attempt) is not None:
                attempt.join(0.5)  # else all steps could be over before it is prepared
    pieces = {name: sw.world.values().values() for name, sw in jobs.items()}
    found = {
        "losses": losses,
        "layouts": layouts,
        "ends": {name: one.ends for name, one in books.items()},
        "values": {name: values(sw) for name, sw in jobs.items()},
        "counted": {name: sw._party.memory.held for name, sw in jobs.items()},
        "lies": {name: sum(local_tensor(v).untyped_storage().nbytes() for v in of) for name, of in pieces.items()},
        "peak": promise.peak,
    }
    for sw in jobs.values():
        sw.close()
    return found


ASKED = {
    1: (("actor", "dp2", "keep"), ("critic", "dp2", "keep"), ("reference", "dp2", "keep")),
    15: (("reference", "fsdp2", "keep"), ("actor", "fsdp2", "keep")),
}
LIMIT = 12 * WEIGHTS
"""On each rank: a job that trains holds three times its weights with ``dp2``, half of that with ``fsdp2``. So at most 8
are held while one is made anew, beside staging, which for tensors as small as these is some 3. Two at once need 15."""


def test_three_jobs_switch_one_after_the_other_within_one_promise_and_train_as_without():
    """All ask at once. Were two to switch together, the second would break the promise, and be aborted."""

    def work(_world):
        return train("still", Promise(1 << 30), {}), train("moves", Promise(LIMIT), ASKED)

    for still, moved in everywhere(2, work):
        wanted = {"actor": ["dp2", "fsdp2"], "critic": ["dp2"], "reference": ["dp2", "fsdp2"]}
        assert {name: [end[:2] for end in ends] for name, ends in moved["ends"].items()} == {
            name: [(layout, "committed") for layout in layouts] for name, layouts in wanted.items()
        }, moved["ends"]
        assert moved["layouts"][-1] == ("fsdp2", "dp2", "fsdp2")
        assert moved["peak"] <= LIMIT
        assert moved["counted"] == moved["lies"]
        for one, other in zip(still["losses"], moved["losses"], strict=True):
            assert abs(one - other) <= 1e-12
        for name, of in still["values"].items():
            for tensor, value in of.items():
                assert (value - moved["values"][name][tensor]).abs().max() <= 1e-12, (name, tensor)


def test_what_a_promise_leaves_no_room_for_is_refused_with_the_numbers_and_names_are_used_once():
    def work(_world):
        promise = Promise(int(4.2 * WEIGHTS))
        found = train("tied", promise, {1: (("critic", "dp2", "keep"), ("reference", "dp2", "auto"))})
        refused = []
        for more in ({"name": "tied-actor"}, {"name": "late", "promise": Promise(WEIGHTS)}):
            with pytest.raises((NameTakenError, PromiseError)) as caught:
                Switcher(trained(1), layout="fsdp2", deadline=15.0, **more)
            refused.append(str(caught.value))
        return found, refused

    for found, refused in everywhere(2, work):
        (kept, tried) = found["ends"]["critic"][0], found["ends"]["reference"][0]
        assert kept[1] == "aborted"
        assert f"rank 0 needs {3 * WEIGHTS} bytes more, and the promise of its process leaves" in kept[2], kept
        assert tried[1] == "aborted"
        assert tried[2].startswith("rank 0: PlanError: mode tight: rank 0 needs"), tried
        assert found["peak"] <= int(4.2 * WEIGHTS)
        assert "called 'tied-actor' has been made in this process before" in refused[0]
        assert "hold 0 of the" in refused[1]
