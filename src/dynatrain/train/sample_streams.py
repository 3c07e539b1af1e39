"""What a sample draws: a function of (seed, epoch, sample) alone, in whatever process and layout it is loaded.

torch seeds a ``DataLoader``'s workers once, when they start, and without workers ``__getitem__`` draws from the streams
of training itself. So Python's, numpy's and torch's process-wide streams are seeded around each sample instead.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from dynatrain.train.streams import Streams

_HOST = torch.device("cpu")
_OWN = ("_dataset", "_seed")

Sample = tuple[int, int]
"""``(epoch, id)``."""


class SampleError(ValueError):
    """A dataset that gives what is no sample."""


class Seeded(Dataset[Any]):
    """A user's map-style dataset, asked for one sample at a time, each with streams of its own.

    All else that is asked of it, or set on it (by a ``worker_init_fn``), is the user's dataset's. A ``collate_fn``
    draws on behind the last sample of its batch. A generator that the dataset keeps for itself is its own affair.

    Args:
        dataset: has ``__getitem__``; where it has ``__getitems__`` too, that is called with one id at a time.
        seed: of the run's order.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, sample: Sample) -> Any:
        """The sample with this id, as it is in this epoch.

        Raises:
            SampleError: ``__getitems__`` gives no list.
        """
        epoch, number = sample
        _seed_all(self._seed, epoch, number)
        several = getattr(self._dataset, "__getitems__", None)
        if not several:
            return self._dataset[number]
        given = several([number])
        # Of a dictionary of columns a batch would be made that has other things in it.
        if isinstance(given, Mapping) or not isinstance(given, Sequence) or len(given) != 1:
            raise SampleError(
                f"{type(self._dataset).__name__}.__getitems__ gives {type(given).__name__} for a list of one id; torch "
                "asks for a list of as many samples"
            )
        return given[0]

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or name.startswith("__"):  # while it is unpickled, too
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._dataset, name, value)


def _seed_all(seed: int, epoch: int, number: int) -> None:
    """Seed the three streams. Some 13 us; ``torch.manual_seed`` would look for devices as well."""
    words = hashlib.blake2b(f"{seed}/{epoch}/{number}/draws".encode(), digest_size=24).digest()
    torch.default_generator.manual_seed(int.from_bytes(words[:8], "little"))
    np.random.seed(int.from_bytes(words[8:12], "little"))  # noqa: NPY002 - the process-wide face; an array takes 10 us
    random.seed(int.from_bytes(words[16:24], "little"))


@contextmanager
def apart() -> Iterator[None]:
    """What is loaded inside leaves the process's own streams where they stand."""
    before = Streams.read(_HOST)
    try:
        yield
    finally:
        before.restore(_HOST)
