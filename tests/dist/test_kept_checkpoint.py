"""A checkpoint that the first schema wrote, kept in the repository: it loads for ever, into any layout, bit by bit."""

import random

import numpy as np
import pytest
import torch
from tests.checkpoint_v1 import FOLDER, RATE, SHAPES, STATES, STEP, job, value
from tests.jobs import everywhere

from dynatrain.observe.checkpoints import MANIFEST, Manifest, damaged, newest
from dynatrain.train.agreement import SwitchAbortedError

ALL = {(name, state) for name in SHAPES for state in (("buffer",) if name == "seen" else STATES)}


def test_it_is_whole():
    folder, problems = newest(FOLDER)

    assert problems == ()
    manifest = Manifest.read(folder)
    assert damaged(folder, manifest.files) == ()
    assert (manifest.schema, manifest.step, manifest.layout, manifest.world_size) == (1, STEP, "fsdp2.tp2", 4)


def taken(world, layout, folder):
    """What a rank has after loading: its boxes of what is not as stamped, and all that has no boxes."""
    sw = job(world, layout)
    for mine in sw.world.values().values():
        mine.fill_(77)
    assert sw.load(folder) == sw.step == STEP
    tensors, held, wrong = {tensor.name: tensor for tensor in sw.world.catalogue}, set(), []
    for (name, state), mine in sw.world.values().items():
        box = sw.world.ownership.box(tensors[name], world.rank) if mine.ndim else ()
        want = value(name, state)[tuple(slice(*ends) for ends in box)]
        held.add((name, state))
        if mine.dtype != want.dtype or not torch.equal(mine, want):
            wrong.append((name, state, box))
    groups = [(g["lr"], g["initial_lr"], g["weight_decay"], g["betas"]) for g in sw.optimizer.param_groups]
    counts = sw.state["schedule"].last_epoch, sw.state["ema"].updates, sw.state["mean"].updates
    drawn = random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002 - the streams that were saved
    return wrong, held, groups, counts, sw.state["scaler"].scale.item(), drawn


def streams(rank):
    torch_stream = torch.Generator().manual_seed(100 + rank)
    drawn = torch.rand((), generator=torch_stream).item()
    return random.Random(100 + rank).random(), np.random.RandomState(100 + rank).rand(), drawn


@pytest.mark.parametrize(("layout", "size"), [("fsdp3", 3), ("dp2.tp2", 4)])
def test_it_loads_into_another_layout_bit_by_bit(layout, size):
    folder, _ = newest(FOLDER)
    for rank, (wrong, held, groups, counts, scale, drawn) in enumerate(
        everywhere(size, lambda world: taken(world, layout, folder))
    ):
        assert wrong == []
        assert held == ALL
        assert groups == [(RATE / (1 + STEP), RATE, decay, (0.5, 0.75)) for decay in (0.25, 0.0)]
        assert counts == (STEP, 3, 3)
        assert scale == 512.0
        assert drawn == streams(rank)


def test_a_later_schema_is_refused_by_name(tmp_path):
    folder, _ = newest(FOLDER)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    manifest = tmp_path / MANIFEST
    manifest.write_text(manifest.read_text().replace('"schema": 1', '"schema": 2'))

    def work(world):
        with pytest.raises(SwitchAbortedError) as refusal:
            job(world, "fsdp2").load(tmp_path)
        return str(refusal.value)

    for said in everywhere(2, work):
        assert "written by a later version (schema 2, known is 1)" in said
