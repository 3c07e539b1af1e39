"""Saved beside training in one layout, loaded in another, on other numbers of ranks: every bit of everything."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.dist.foreign import build_net, everywhere, switcher, whole
from tests.dist.test_switcher_state import Loop, equal
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dynatrain.observe.checkpoints import MANIFEST, Manifest, checkpoints, newest
from dynatrain.train.agreement import SwitchAbortedError
from dynatrain.train.saving import Saves

PLAIN = Path(__file__).with_name("plain_resume.py")


def saved_run(root, *, layout="fsdp2", size=2, until=10, every=4, tour=None, **settings):
    """A run of ``Loop``, saved by intervals and at its end: of each rank its log, its switches and its saves."""

    def work(world):
        found = []
        saves = Saves(root=root, run_id="run", every=every, **settings)
        loop = Loop(world, tour or {}, layout=layout, saves=saves, on_saved=found.append, data_parallel="free")
        log, ends = loop.run(until)
        loop.sw.save_now()
        return log, ends, [(s.step, s.outcome if s.outcome != "failed" else s.message) for s in found]

    return everywhere(size, work)


def resumed(path, *, layout, size, until):
    """The same loop, gone on from a checkpoint: of each rank its first step, its state then, and its log."""

    def work(world):
        loop = Loop(world, {}, layout=layout, data_parallel="free")
        first = loop.sw.load(path)
        return first, loop.state(), loop.run(until)[0]

    return everywhere(size, work)


@pytest.mark.parametrize(
    ("before", "after"), [(("fsdp2", 2), ("dp2", 2)), (("dp2", 2), ("fsdp2", 2)), (("fsdp2", 2), ("fsdp2.tp2", 4))]
)
def test_every_bit_comes_back_in_another_layout(tmp_path, before, after):
    logs = saved_run(tmp_path, layout=before[0], size=before[1])
    assert all(log[2] == logs[0][2] for log in logs)
    assert {outcome for _, outcome in logs[0][2]} == {"done"}
    assert logs[0][2][0][0] == 4
    assert logs[0][2][-1][0] == 10
    folder, problems = newest(tmp_path)
    assert problems == ()
    assert [path.name for path in checkpoints(tmp_path)][-1] == "step_00000010"
    assert len(checkpoints(tmp_path)) == 2, "the last two stay"
    manifest = Manifest.read(folder)
    assert (manifest.step, manifest.layout, manifest.world_size) == (10, before[0], before[1])
    assert set(manifest.objects) == {"lr", "local", "shared", "scaler"}
    for first, state, _ in resumed(folder, layout=after[0], size=after[1], until=10):
        assert first == 10
        last = logs[0][0][-1][2]
        moved = {key: value for key, value in state.items() if key not in ("options", "sizes")}
        assert equal(moved, {key: last[key] for key in moved}) == []


def test_a_resumed_run_goes_on_with_the_bits_of_the_run_that_never_stopped(tmp_path):
    plain = saved_run(tmp_path / "a", until=10)
    saved_run(tmp_path / "b", until=6)
    for (log, _, _), (first, _, rest) in zip(
        plain, resumed(newest(tmp_path / "b")[0], layout="fsdp2", size=2, until=10), strict=True
    ):
        assert first == 6
        assert len(rest) == 4
        for (loss, at_start, at_end, _), (expected, start, end, _) in zip(rest, log[6:], strict=True):
            assert loss == expected
            assert equal(at_start, start) == []
            assert equal(at_end, end) == []


def test_a_save_is_of_one_step_whatever_switches_beside_it(tmp_path):
    tour = {3: "dp2", 7: "fsdp2", 11: "dp2"}
    logs = saved_run(tmp_path, tour=tour, until=18, every=1, keep_last=99)
    assert [end[1] for end in logs[0][1]] == ["committed"] * 3
    for path in checkpoints(tmp_path):
        step = Manifest.read(path).step
        for _, state, _ in resumed(path, layout="fsdp2", size=2, until=step):
            before = logs[0][0][step - 1][2]
            kept = {key: value for key, value in state.items() if key not in ("options", "sizes")}
            assert equal(kept, {key: before[key] for key in kept}) == []


def test_random_streams_come_back(tmp_path):
    def work(world):
        loop = Loop(world, {}, saves=Saves(root=tmp_path))
        drawn = [draw() for _ in range(3)]
        loop.sw.save_now()
        after = [draw() for _ in range(3)]
        loop.sw.load(newest(tmp_path)[0])
        return drawn != after, [draw() for _ in range(3)] == after

    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002 - the process-wide one

    assert everywhere(2, work) == [(True, True)] * 2


def test_ranks_that_are_new_get_streams_of_their_own_and_the_others_keep_theirs(tmp_path):
    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002 - the process-wide one

    def seed(number):
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002
        torch.manual_seed(number)

    def begin(world):
        loop = Loop(world, {}, layout="dp2", data_parallel="free", saves=Saves(root=tmp_path))
        seed(world.rank)  # behind the build, whose weights are to be equal in all copies
        loop.sw.save_now()
        return draw()

    def go_on(world):
        seed(0)  # as user code does, on all ranks alike
        loop = Loop(world, {}, layout=f"dp{world.size}", data_parallel="free")
        loop.sw.load(newest(tmp_path)[0])
        return draw()

    before = everywhere(2, begin)
    more, again = everywhere(3, go_on), everywhere(3, go_on)

    assert more[:2] == before
    assert more == again
    for stream in zip(*more, strict=True):
        assert len(set(stream)) == 3


def build_plain(mesh, _layout):
    if torch.empty(0).device.type != "meta":
        torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    if mesh["tp"].size() > 1:
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["fsdp"])
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def test_plain_pytorch_goes_on_from_it_without_us(tmp_path):
    def work(world):
        losses = []
        sw = switcher(world, build_plain, "fsdp2.tp2", saves=Saves(root=tmp_path), data_parallel="free")
        for step in sw.steps(until=6):
            if step == 4:
                sw.save_now()
            x = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(8, 5) + step / 10
            loss = sw.model(x).square().mean()
            loss.backward()
            sw.optimizer.step()
            sw.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    (expected, *_) = everywhere(4, work)
    (folder,) = checkpoints(tmp_path)
    out = tmp_path / "losses"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", PLAIN, folder, "4"]
    ended = subprocess.run([*map(str, command), str(out)], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = [float(line) for line in out.read_text().split()]
    assert found == pytest.approx(expected[4:6], rel=0, abs=1e-12)


def test_somebody_elses_checkpoint_loads_into_any_layout(tmp_path):
    """As torchtitan lays it out: model at the top, the optimizer flattened, saved under FSDP2 x TP."""

    def save(_world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        torch.manual_seed(7)
        net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(net, mesh=mesh["fsdp"])
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        net(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        optim = get_optimizer_state_dict(net, optimizer, options=options)
        dcp.save(net.state_dict() | {"optimizer": optim}, checkpoint_id=tmp_path / "theirs")
        return {name: whole(p) for name, p in net.named_parameters()}, {
            (name, key): whole(value) if value.ndim else value.clone()
            for name, p in net.named_parameters()
            for key, value in optimizer.state[p].items()
        }

    def take(world):
        sw = switcher(world, build_plain, "fsdp3")
        step = sw.load(tmp_path / "theirs")
        held = {name: entry.value for name, entry in sw.world.found.items()}
        return (
            step,
            {name: whole(value) for name, value in held.items()},
            {
                (name, key): whole(value) if value.ndim else value.clone()
                for name, param in held.items()
                for key, value in sw.optimizer.state[param].items()
            },
        )

    (values, moments), *_ = everywhere(4, save)
    for step, found, states in everywhere(3, take):
        assert step == 0
        assert all(torch.equal(found[name], value) for name, value in values.items())
        assert states.keys() == moments.keys()
        assert all(torch.equal(states[key], value) for key, value in moments.items())


def renamed(tmp_path, change):
    """A saved run of two ranks, one thing of its checkpoint changed."""
    saved_run(tmp_path, until=3, every=0)
    (folder,) = checkpoints(tmp_path)
    change(folder)
    return folder


def cut_short(folder):
    shard = folder / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])


def flip_a_bit(folder):
    shard = folder / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut_short, "__1_0.distcp has"),
        (flip_a_bit, "__0_0.distcp has hash"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda folder: (folder / ".metadata").unlink(), "it has no .metadata"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "manifest.json is not JSON"),
        (lambda folder: (folder / MANIFEST).write_text('{"schema": 99}'), "written by a later version"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name_and_nothing_is_changed(tmp_path, change, said):
    folder = renamed(tmp_path, change)

    def work(world):
        loop = Loop(world, {})
        before = loop.state()
        with pytest.raises(SwitchAbortedError) as refusal:
            loop.sw.load(folder)
        return str(refusal.value), equal(before, loop.state()), loop.sw.step

    for words, differs, step in everywhere(2, work):
        assert said in words
        assert (differs, step) == ([], 0)


def test_what_is_missing_or_left_over_is_refused_by_name(tmp_path):
    saved_run(tmp_path, until=3, every=0)
    (folder,) = checkpoints(tmp_path)

    def work(world):
        sw = switcher(world, build_net, "fsdp2", state={"extra": lambda _: Nothing()})
        with pytest.raises(SwitchAbortedError) as refusal:
            sw.load(folder)
        return str(refusal.value)

    for words in everywhere(2, work):
        assert "it has objects.shared" in words
        assert "which nothing here takes" in words

    def registered(world):
        loop = Loop(world, {}, state={"extra": lambda _: Nothing()})
        with pytest.raises(SwitchAbortedError) as refusal:
            loop.sw.load(folder)
        return str(refusal.value)

    for words in everywhere(2, registered):
        assert "it has lr, which is not registered here" in words
        assert "it has no extra, which is registered here" in words


class Nothing:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}
