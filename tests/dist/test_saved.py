"""Saved beside training in one layout, loaded in another, on other numbers of ranks: every bit of everything."""

import random

import numpy as np
import pytest
import torch
from tests.dist.foreign import everywhere
from tests.dist.test_switcher_state import Loop, equal

from dynatrain.observe.checkpoints import Manifest, checkpoints, newest
from dynatrain.train.saving import Saves


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
