"""Saves that are killed or that the disk refuses: the newest complete one always loads, and training goes on."""

import os
import resource
import signal
import sys
import threading

import pytest
from tests import ranks
from tests.dist.foreign import _inside, batch, everywhere
from tests.dist.test_switcher_state import Loop, equal
from torch.nn import functional

from dynatrain.observe.checkpoints import (
    Manifest,
    checkpoint_name,
    checkpoints,
    damaged,
    leftovers,
    newest,
    usable,
)
from dynatrain.train import taken
from dynatrain.train.saver import SavingError
from dynatrain.train.saving import Saves

POINTS = 20
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link"}
"""What a save asks of the file system, as Python's audit hooks see it."""


def save_twice(world, root, end_at=0):
    """Save before steps 2 and 4, and end the process at the ``end_at``-th thing that the second save does to files."""
    done, count = [], [0]
    loop = Loop(world, {}, layout="dp1", saves=Saves(root=root), on_saved=done.append)

    def hook(event, arguments):
        mine = threading.current_thread().name.startswith("save-2")
        if mine and event in EVENTS and str(root) in str(arguments[0]):
            count[0] += 1
            if count[0] == end_at:
                os._exit(9)

    sys.addaudithook(hook)
    loop.run(2)
    loop.sw.save_now()
    loop.run(4)
    loop.sw.save_now()
    return count[0], [saved.outcome for saved in done]


def test_whenever_a_save_is_killed_the_newest_complete_one_is_whole(tmp_path):
    (count, outcomes), *_ = everywhere(1, lambda world: save_twice(world, tmp_path / "all"))
    assert outcomes == ["done", "done"]
    assert count >= POINTS / 2
    seen = set()
    for point in sorted({1 + at * count // POINTS for at in range(POINTS)}):
        root = tmp_path / str(point)
        (result,) = ranks.run(1, lambda world, r=root, p=point: _inside(world, lambda w: save_twice(w, r, p)), 60)
        assert result is None, "it was to be killed"
        folder, problems = newest(root)
        assert folder is not None
        manifest = Manifest.read(folder)
        assert damaged(folder, manifest.files) == ()
        assert problems == ()
        seen.add(manifest.step)
    assert seen == {2, 4}, "before the rename the old one, after it the new one"


def test_what_a_killed_save_left_is_gone_after_the_next(tmp_path):
    ranks.run(1, lambda world: _inside(world, lambda w: save_twice(w, tmp_path, 3)), 60)
    assert list(leftovers(tmp_path))

    def go_on(world):
        loop = Loop(world, {}, layout="dp1", saves=Saves(root=tmp_path))
        loop.sw.load(newest(tmp_path)[0])
        loop.run(5)
        return loop.sw.save_now()

    assert everywhere(1, go_on) == [f"saved in {tmp_path / 'step_00000005'}"]
    assert list(leftovers(tmp_path)) == []
    assert [Manifest.read(path).step for path in checkpoints(tmp_path)] == [2, 5]


def test_a_disk_that_takes_no_more_fails_the_save_by_name_and_training_goes_on(tmp_path):
    def work(world):
        done = []
        loop = Loop(world, {}, saves=Saves(root=tmp_path, every=3), on_saved=done.append)
        if world.rank == 1:  # one rank's disk is full
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        log, _ = loop.run(8)
        loop.sw._saver.finish()
        return [(saved.outcome, saved.message) for saved in done], log

    def plain(world):
        return Loop(world, {}).run(8)[0]

    for (saves, log), expected in zip(everywhere(2, work), everywhere(2, plain), strict=True):
        assert saves
        for outcome, message in saves:
            assert outcome == "failed"
            assert "rank 1: OSError" in message
            assert "File too large" in message
        assert [step[0] for step in log] == [step[0] for step in expected]
        assert equal(log[-1][2], expected[-1][2]) == []
    assert list(tmp_path.iterdir()) == []


def test_files_that_lack_an_element_never_become_a_checkpoint(tmp_path):
    def work(world):
        written = taken.written_pieces
        if world.rank == 1:  # its last piece is forgotten
            taken.written_pieces = lambda *given, **how: dict(list(written(*given, **how).items())[:-1])
        loop = Loop(world, {}, saves=Saves(root=tmp_path))
        loop.run(2)
        return loop.sw.save_now(), loop.sw.saved

    for said, saved in everywhere(2, work):
        assert said.startswith("not saved: ")
        assert "elements missing" in said
        assert saved == -1
    assert list(tmp_path.iterdir()) == []


def test_a_loop_that_was_left_behind_its_update_is_saved_with_that_step_and_no_step_is_saved_half_made(tmp_path):
    def work(world):
        loop, names = Loop(world, {}, saves=Saves(root=tmp_path)), []
        for leaves_early in (False, True):
            for _ in loop.sw.steps(until=9):
                inputs, targets = batch(0, world.rank)
                functional.mse_loss(loop.sw.model(inputs), targets).backward()
                with pytest.raises(SavingError, match="is under way"):
                    loop.sw.save_now()
                if leaves_early:
                    break
                loop.sw.optimizer.step()
                break
            loop.sw.optimizer.zero_grad()
            names.append(loop.sw.step)
        return names, loop.sw.save_now()

    for names, said in everywhere(2, work):
        assert names == [1, 1]
        assert said.endswith(checkpoint_name(1))


def test_a_job_without_a_place_for_checkpoints_says_so_when_it_is_to_be_saved():
    def work(world):
        loop = Loop(world, {}, layout="dp1")
        for save in (loop.sw.save, loop.sw.save_now):
            with pytest.raises(SavingError, match=r"give Switcher\(saves=Saves"):
                save()
        return loop.sw.saved

    assert everywhere(1, work) == [-1]


def test_ranks_that_share_no_disk_are_told_so(tmp_path):
    def work(world):
        done = []
        loop = Loop(world, {}, saves=Saves(root=tmp_path / str(world.rank)), on_saved=done.append)
        loop.sw.save_now()
        return done[0].outcome, done[0].message

    for outcome, message in everywhere(2, work):
        assert outcome == "failed"
        assert "__1_0.distcp cannot be seen from rank 0: all ranks must share the disk" in message
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_state_that_could_not_be_read_back_is_refused_by_name(tmp_path):
    class Odd:
        def state_dict(self):
            return {"thing": threading.Event}

        def load_state_dict(self, state):
            assert state

    def work(world):
        done = []
        loop = Loop(world, {}, saves=Saves(root=tmp_path), on_saved=done.append)
        loop.sw.register("odd", Odd())
        loop.sw.save_now()
        return done[0].outcome, done[0].message

    for outcome, message in everywhere(2, work):
        assert outcome == "failed"
        assert "the state of odd could not be read back" in message
    assert checkpoints(tmp_path) == ()


@pytest.mark.parametrize("budget", [1, 600])
def test_a_snapshot_is_bounded_and_the_optimizer_waits_for_it(tmp_path, budget):
    def work(world):
        loop = Loop(world, {}, saves=Saves(root=tmp_path, every=2, budget=budget))
        log, _ = loop.run(5)
        loop.sw._saver.finish()
        return [step[0] for step in log]

    def plain(world):
        return [step[0] for step in Loop(world, {}).run(5)[0]]

    assert everywhere(2, work) == everywhere(2, plain)
    assert all(map(usable, checkpoints(tmp_path)))
    assert checkpoints(tmp_path)
