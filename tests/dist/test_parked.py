"""A job whose state leaves for host memory and comes back trains on as if nothing had been."""

import ctypes
import gc
import hashlib
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.dist.foreign import Scaler, Shadow, batch, build_net, everywhere, switcher
from torch import nn
from torch.distributed.fsdp import fully_shard

from dynatrain.app.verify import check_switch
from dynatrain.cluster.board import Board
from dynatrain.execute.pieces import Pool
from dynatrain.execute.promise import Promise
from dynatrain.observe.run import RunFolder
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.parking import ParkedError
from dynatrain.train.record import Recorder
from dynatrain.train.retire import RetiredHandleError

MIB = 1 << 20


def bits(sw):
    """A hash of everything that this rank holds."""
    found = hashlib.sha256()
    for key, value in sorted(sw.world.values().items()):
        found.update(repr(key).encode() + bytes(memoryview(value.detach().contiguous().view(-1).clone().numpy())))
    return found.hexdigest()


def update(sw, step):
    """One step of a loop of one's own; the bits behind it."""
    inputs, wanted = batch(step, sw.layout.coordinates(dist.get_rank()).fsdp)
    (sw.model(inputs) - wanted).square().mean().backward()
    sw.optimizer.step()
    sw.optimizer.zero_grad()
    sw.state["ema"].update(sw.model)
    sw.state["scaler"].update()
    return bits(sw)


def job(world, name, **more):
    sw = switcher(world, build_net, "fsdp2", name=name, state={"scaler": Scaler()}, data_parallel="free", **more)
    sw.register("ema", Shadow(sw.model, local=False))
    return sw


def test_training_goes_on_to_the_bit_and_handles_raise_while_parked(tmp_path):
    def work(world):
        still = job(world, "still")
        wanted = [update(still, step) for step in still.steps(until=8)]
        still.close()
        folder = RunFolder(tmp_path / "run")
        board = Board(dist.PrefixStore("away/board", world.store.clone()), world.size)
        books = Recorder(folder, board, rank=world.rank, generation=0, attempt=0, rates=None)
        sw = job(world, "away", recorder=books, board=board)
        found, raised, held = [], [], []
        model, weight = sw.model, sw.model.inside.weight
        for step in sw.steps(until=8):
            if step == 2:  # before the step
                sw.park()
                sw.park()
                held.append((sw.parked, sw._party.memory.held))
                uses = (lambda: model(batch(0, 0)[0]), lambda: weight + 1, sw.optimizer.step, sw.model.unshard)
                uses += (lambda: sw.state["ema"].entries["inside.weight"] * 2, lambda: sw.register("b", object()))
                for use in uses:
                    with pytest.raises((RetiredHandleError, ParkedError), match="parked") as caught:
                        use()
                    raised.append(str(caught.value))
                sw.unpark()
                sw.unpark()
            found.append(update(sw, step))
            if step == 4:  # behind its update
                sw.park()
                sw.unpark()
        same = sw.model is model and sw.model.inside.weight is weight
        sw.close()
        return wanted, found, raised, held, same

    RunFolder.create(tmp_path / "run", config="", environment={})
    for wanted, found, raised, held, same in everywhere(2, work):
        assert found == wanted
        assert (held, len(raised), same) == ([(True, 0)], 6, True)
    folder = RunFolder(tmp_path / "run")
    assert len(list(folder.switches.iterdir())) == 4
    for number in range(1, 5):
        checked = check_switch(folder.switch(number))
        assert (checked.problems, checked.record["outcome"]) == ((), "committed")
        verb = "park" if number % 2 else "unpark"
        assert (checked.record["cause"]["verb"], checked.record["lost_seconds"]) == (verb, None)
        assert checked.record["bytes"]["relaid"] == sum(part["written"] for part in checked.record["coverage"].values())
        assert all(peak["measured"] <= peak["predicted"] for peak in checked.record["peak_bytes"]["host"].values())


class Wide(nn.Module):
    """24 MiB of weights in fp64, 72 with moments: enough to be seen in a process."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def sharded_wide(mesh, dtype):
    model = Wide().to(dtype)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp", "fsdp"])
    return model


def build_wide(mesh, layout):  # noqa: ARG001 - the mesh says it all
    model = sharded_wide(mesh, torch.float64)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def resident():
    """``(anonymous, shared)`` bytes of this process that are resident."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def test_resident_bytes_fall_by_the_state_while_it_is_parked_and_it_takes_no_longer_than_a_moment():
    def work(world):
        torch.manual_seed(1)
        sw = switcher(world, build_wide, "fsdp2", data_parallel="free")
        seen, seconds = [], []
        for step in sw.steps(until=3):
            sw.model(torch.full((2, 1024), step + 1.0, dtype=torch.float64)).sum().backward()
            sw.optimizer.step()
            sw.optimizer.zero_grad()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            seen.append(resident())
            began = time.monotonic()
            sw.park()
            seconds.append(time.monotonic() - began)
            seen.append(resident())
            began = time.monotonic()
            sw.unpark()
            seconds.append(time.monotonic() - began)
            seen.append(resident())
        held = sw._party.memory.held
        sw.close()
        return seen, seconds, held

    for seen, seconds, held in everywhere(2, work):
        assert held >= 36 * MIB
        for here, away, back in zip(seen[::3], seen[1::3], seen[2::3], strict=True):
            assert here[0] - away[0] > 0.95 * held, (seen, held)
            assert away[1] - here[1] < MIB
            assert back[0] - away[0] > 0.95 * held
            assert back[1] - here[1] < MIB
        assert max(seconds) < 20, seconds  # a hang guard; it takes a fraction of a second


class FaultError(Exception):
    """Planted."""


def test_what_goes_wrong_on_one_rank_leaves_the_state_where_it_was_on_all_of_them():
    def work(world):
        planted = {}

        def hook(event, number, switch):  # noqa: ARG001 - the hook's face
            if planted.get(world.rank) == event:
                raise FaultError(event)

        promise = Promise(1 << 30)
        sw = job(world, "", hook=hook, memory=Pool(promise=promise))
        said = []

        def refused(verb, rank=-1, event=""):
            before = sw.parked
            planted[rank] = event
            with pytest.raises(SwitchAbortedError) as caught:
                getattr(sw, verb)()
            planted.clear()
            said.append(str(caught.value))
            assert sw.parked == before

        for step in sw.steps(until=3):
            update(sw, step)
            before = bits(sw)
            for event in ("build", "quiesce", "move", "received", "check", "commit"):
                refused("park", 1, event)
                assert bits(sw) == before, event
            held = promise.held
            sw.park()
            assert (promise.held, held) == (0, held)
            for event in ("build", "move", "received", "check", "commit"):
                refused("unpark", 0, event)
                assert promise.held == 0
            promise.take((1 << 30) - held + 1)  # by another job
            refused("unpark")
            promise.give_back((1 << 30) - held + 1)
            piece = next(iter(sw._parking._parked.pieces.values())).tensor.view(-1)
            kept = piece[0].clone()
            if world.rank == 1:
                piece[0] += 1
            refused("unpark")
            if world.rank == 1:
                piece[0] = kept
            sw.unpark()
            assert (bits(sw), promise.held) == (before, held)
        sw.close()
        return said, held

    for said, held in everywhere(2, work):
        assert said[0] == "rank 1: FaultError: build"
        assert said[6] == "rank 0: FaultError: build"
        assert f"needs {held} bytes more, and the promise of its process leaves {held - 1}" in said[11]
        assert said[12] == "rank 1: host memory has other bits than were parked"


def build_frozen(mesh, layout):  # noqa: ARG001 - the mesh says it all
    """What trains nothing: no optimizer, weights in 16 bits."""
    return sharded_wide(mesh, torch.bfloat16), None


def test_a_reference_without_an_optimizer_parks_switches_and_is_what_it_was():
    def work(world):
        torch.manual_seed(1)
        sw = switcher(world, build_frozen, "fsdp2")
        x = torch.ones(1, 1024, dtype=torch.bfloat16)
        before = sw.model(x)
        found = []
        for step in sw.steps(until=400):
            if step == 1:
                sw.park()
                sw.unpark()
                sw.request("dp2")
            dist.barrier()
            with torch.no_grad():
                found.append(sw.model(x).equal(before))
            if str(sw.layout.axes) != str(sw.world.layout.axes) or sw.layout.size("dp") == 2:
                break
        layout = sw.layout.size("dp")
        sw.close()
        return all(found), layout

    assert everywhere(2, work) == [(True, 2)] * 2
