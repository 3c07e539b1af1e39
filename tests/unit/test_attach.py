"""Memory of other processes: described by stretches, read whatever their strides, refused with a reason."""

import itertools
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest

from dynatrain.execute import attach
from dynatrain.execute.attach import Spans, machine, read

pytestmark = pytest.mark.clock


def spans(array):
    return Spans.of(array.ctypes.data, array.shape, array.strides)


def places(array):
    """Addresses of all bytes of an array of bytes, in its order: slow and obvious."""
    ways = itertools.product(*(range(size) for size in array.shape))
    return [array.ctypes.data + sum(i * s for i, s in zip(way, array.strides, strict=True)) for way in ways]


def some_views(count, seed=3):
    draw = random.Random(seed)
    for _ in range(count):
        shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 4))]
        whole = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
        slices = [(low := draw.randint(0, size - 1), draw.randint(low + 1, size)) for size in shape]
        yield whole[tuple(slice(*ends) for ends in slices)]


def test_stretches_are_the_bytes_of_an_array_in_order():
    for view in some_views(80):
        found = spans(view)
        assert found.nbytes == view.nbytes
        assert [start + i for start in found.starts for i in range(found.length)] == places(view)


def test_a_part_of_the_stretches_is_the_bytes_between_two_places():
    draw = random.Random(4)
    for view in some_views(80):
        first = draw.randint(0, view.nbytes - 1)
        last = draw.randint(first + 1, view.nbytes)
        part = spans(view).part(first, last)
        assert [start + i for start, length in part for i in range(length)] == places(view)[first:last]


def test_rows_that_lie_together_are_one_stretch():
    array = np.zeros((6, 8), np.uint8)
    assert (len(spans(array).starts), spans(array).length) == (1, 48)
    assert (len(spans(array[2:4]).starts), spans(array[2:4]).length) == (1, 16)
    assert (len(spans(array[:, 2:4]).starts), spans(array[:, 2:4]).length) == (6, 2)


@pytest.mark.parametrize("at_once", [1, 7, 64, 1 << 22])
def test_bytes_arrive_whatever_the_strides_of_both_ends_and_however_many_calls_it_takes(monkeypatch, at_once):
    monkeypatch.setattr(attach, "_AT_ONCE", at_once)
    monkeypatch.setattr(attach, "_MOST_SPANS", 3)
    draw = np.random.default_rng(5)
    source, target = draw.integers(0, 256, (9, 5, 12), np.uint8), np.zeros((12, 9, 20), np.uint8)
    for there, here in (
        (source[:, 1:4, 3:7], target[:9, :3, :4]),
        (source[2:4], target[2:4, :5, 8:]),
        (source[:1, :1], target[3:4, :1, :12]),
    ):
        here[...] = 0
        read(os.getpid(), spans(there), spans(here), time.monotonic() + 10)
        assert (here == there).all()


def test_a_process_that_is_gone_and_memory_that_is_not_there_are_errors():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    place = spans(np.zeros(8, np.uint8))
    with pytest.raises(OSError, match="No such process"):
        read(gone.pid, place, place, time.monotonic() + 10)
    with pytest.raises(OSError, match="Bad address"):
        read(os.getpid(), Spans.of(4096, (8,), (1,)), place, time.monotonic() + 10)


def test_what_takes_too_long_ends_at_the_deadline():
    place = spans(np.zeros(8, np.uint8))
    with pytest.raises(TimeoutError):
        read(os.getpid(), place, place, time.monotonic() - 1)


def test_processes_of_one_machine_have_the_same_number_for_it_and_those_apart_another(monkeypatch):
    words = "from dynatrain.execute.attach import machine; print(machine())"
    other = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert int(other.stdout) == machine()
    monkeypatch.setattr(attach.Path, "readlink", lambda _path: "pid:[1]")
    assert int(other.stdout) != machine()
