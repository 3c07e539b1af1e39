"""How fast this machine is at the moment: a promise in seconds is about work, and other machines take longer for it."""

import itertools
import statistics
import time

UNIT = 0.037
"""Processor seconds of :func:`_work` on the idle machine (two cores) on which the promises were made."""


def allowed(seconds):
    """What a promise of ``seconds`` comes to here and now; never less than the promise."""
    return seconds * max(1.0, statistics.median(_took() for _ in range(9)) / UNIT)


def _took():
    began = time.process_time()
    _work()
    return time.process_time() - began


def _work():
    """Tuples, dictionaries and integers, as planning has them."""
    boxes = {}
    for key in itertools.product(range(40), range(40), range(20)):
        boxes[key] = tuple((start * 8, start * 8 + 8) for start in key)
    return sum(stop - start for box in boxes.values() for start, stop in box)
