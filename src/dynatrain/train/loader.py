"""Data for loops that are not ours: one global batch a step, of which every data rank gets its own items.

    data = DatasetLoader(dataset, global_batch=64, seed=0, num_workers=4)
    sw = Switcher(build, layout="fsdp4", data_parallel="free", state={"data": data})
    for step in sw.steps(until=1000):
        loss = train_step(sw.model, sw.optimizer, data.next(sw))

Item ``i`` of a global batch goes to data rank ``i mod n``, where ``n = sw.layout.data_ranks``; ranks of one data rank
(its tp and pp ranks) get equal batches. The cursor is the number of items taken. It knows no ranks, no layout and no
size of batches, so a saved cursor goes on in any world, with any global batch; where it counts in another order (other
seed, other number of samples) it is refused. It moves with ``sw.step``, not with calls: a step that comes again after
an aborted switch, and a second call within a step, get the same global batch.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count, islice
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, default_collate

from dynatrain.data.order import ids_from
from dynatrain.layout.form import LayoutError
from dynatrain.layout.layout import Layout
from dynatrain.layout.nearest import ranked
from dynatrain.layout.text import print_layout, short_layout
from dynatrain.train.sample_streams import Sample, Seeded, apart
from dynatrain.train.switcher import Switcher

Share = tuple[int, int]
"""``(data rank, number of data ranks)``."""

_OURS = ("batch_sampler", "batch_size", "drop_last", "generator", "persistent_workers", "sampler", "shuffle")


class LoaderError(ValueError):
    """A loader that cannot be made as asked, or data that it cannot serve."""


class _Cursor:
    """How many items were taken, and at which step the last ones.

    Args:
        global_batch: items of one step, over all data ranks.
    """

    def __init__(self, global_batch: int) -> None:
        if global_batch < 1:
            raise LoaderError(f"global_batch is {global_batch}; at least 1")
        self.global_batch = global_batch
        self._taken = 0
        self._step: int | None = None

    def check_layout(self, layout: Layout) -> None:
        """Refuse a layout whose data ranks cannot have equal shares; the ``Switcher`` asks before it switches.

        Raises:
            LayoutError: with the nearest that can.
        """
        ways = layout.data_ranks
        if self.global_batch % ways:
            near = (other for other in ranked(layout, layout.world_size) if not self.global_batch % other.data_ranks)
            raise LayoutError(
                f"{short_layout(layout)} cannot share this loop's batches",
                (f"its {ways} data ranks (dp x fsdp) do not divide the global batch of {self.global_batch}",),
                tuple(map(print_layout, islice(near, 3))),
            )

    def _first(self, step: int) -> int:
        """How many items come before those of ``step``: the last ones where the step is the same, else the next."""
        if self._step != step:
            self._step = step
            self._taken += self.global_batch
        return self._taken - self.global_batch

    def _share(self, layout: Layout) -> Share:
        self.check_layout(layout)
        at = layout.coordinates(dist.get_rank())
        return at.dp * layout.size("fsdp") + at.fsdp, layout.data_ranks

    def state_dict(self) -> dict[str, Any]:
        """The cursor; equal on all ranks. The step is told with it: a switch may come inside one."""
        return {"items": self._taken, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the items that ``state`` has taken, whatever step comes next and however many it takes.

        Raises:
            LoaderError: it does not say how many.
        """
        if "items" not in state:
            raise LoaderError(
                f"the loader's state has {', '.join(state) or 'nothing'}, and not the number of items that were taken. "
                "An older dynatrain wrote batches: give items = batches x global batch, and what else state_dict() has"
            )
        if not self._is_here(state):
            self._taken, self._step = state["items"], None

    def _is_here(self, state: dict[str, Any]) -> bool:
        """Whether ``state`` is where this cursor stands in a step: a switch inside one gives back what it took."""
        return self._step is not None and (state["items"], state.get("step")) == (self._taken, self._step)


class _Shares:
    """The batch sampler of a ``DataLoader``: the samples of one share, from one global batch on, without an end."""

    def __init__(self, seed: int, global_batch: int, num_samples: int) -> None:
        self._seed = seed
        self._global_batch = global_batch
        self._num_samples = num_samples
        self.first, self.share = 0, (0, 1)

    def __iter__(self) -> Iterator[list[Sample]]:
        rank, ways = self.share
        for first in count(self.first, self._global_batch):
            ids = ids_from(self._seed, first, self._global_batch, self._num_samples)[rank::ways].tolist()
            yield [((first + rank + i * ways) // self._num_samples, number) for i, number in enumerate(ids)]


class DatasetLoader(_Cursor):
    """A map-style ``Dataset``, shuffled by ``dynatrain.data.order``, loaded by a torch ``DataLoader``.

    Batch ``k`` has the samples ``batch_ids(seed, k, global_batch, len(dataset))``: each once an epoch. Batches run on
    from epoch to epoch: where the global batch does not divide the data, one batch holds the end of an epoch and the
    beginning of the next; nothing is dropped or repeated to fill up.

    Each data rank loads its own share and nothing else. Workers persist; they load ahead under the layout of the
    moment, and what they have loaded is thrown away when the share changes (at most ``num_workers * prefetch_factor``
    batches).

    What a sample draws from Python's, numpy's and torch's process-wide streams on the host is a function of the seed,
    the epoch and its id: the same in every layout, with any number of workers, after a resume; and the streams of the
    training process stay where they stand. See :class:`dynatrain.train.sample_streams.Seeded`, also for its price. What
    a ``collate_fn`` draws is equal on ranks of one data rank, and another for each data rank: it follows from the
    batch's last sample, hence from the layout.

    Args:
        dataset: has ``__len__`` and ``__getitem__``; equal on all ranks.
        global_batch: samples of one step; a multiple of the data ranks of every layout.
        seed: of the order, and of what samples draw.
        **options: of ``torch.utils.data.DataLoader``: ``num_workers``, ``collate_fn``, ``pin_memory``, ...

    Raises:
        LoaderError: all that cannot be so, by name.
    """

    def __init__(self, dataset: Dataset[Any], *, global_batch: int, seed: int = 0, **options: Any) -> None:
        super().__init__(global_batch)
        problems = [f"{name} is decided here and cannot be given" for name in _OURS if name in options]
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            problems.append(f"{type(dataset).__name__} has no length or no items; StreamLoader takes what is iterated")
        elif not len(dataset):
            problems.append("the dataset is empty")
        if problems:
            raise LoaderError("; ".join(problems))
        self._order = {"seed": seed, "samples": len(dataset)}
        self._ids = _Shares(seed, global_batch, len(dataset))
        in_process = not options.get("num_workers", 0)
        self._loader = DataLoader(
            Seeded(dataset, seed),
            batch_sampler=self._ids,
            persistent_workers=not in_process,
            generator=torch.Generator(),  # else each change of share drew from the process's own
            **options,
        )
        self._apart = apart if in_process else nullcontext
        self._batches: Iterator[Any] = iter(())
        self._next: tuple[int, Share] | None = None

    def next(self, switcher: Switcher) -> Any:
        """This rank's share of the global batch of ``switcher.step``, collated. All ranks call it, once a step."""
        first, share = self._first(switcher.step), self._share(switcher.layout)
        if self._next != (first, share):
            self._ids.first, self._ids.share = first, share
            self._batches = iter(self._loader)
        self._next = first + self.global_batch, share
        with self._apart():
            return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """The cursor, with what else the order is a function of."""
        return {**super().state_dict(), **self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the items that ``state`` has taken; the global batch may be another.

        Raises:
            LoaderError: it counts in another order: of another seed, or of another number of samples.
        """
        if problems := [
            f"{k} was {state.get(k)} and is {here}" for k, here in self._order.items() if state.get(k) != here
        ]:
            raise LoaderError(
                f"the loader's state is of another order of samples: {'; '.join(problems)}. Items would come twice or "
                "never; keep what it was, or begin anew without this state"
            )
        super().load_state_dict(state)


class Source(Protocol):
    """A stream of items that can say and take back where it stands, such as torchdata's ``StatefulDataLoader``."""

    def __iter__(self) -> Iterator[Any]:
        """Go on from a state that was loaded and not yet used, else begin an epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Where the last iterator stands, behind the items that it gave out."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from there."""


class StreamLoader(_Cursor):
    """Any iterable with ``state_dict`` and ``load_state_dict``, read alike by every rank.

    The cursor is the source's own state, behind the items of the last global batch. The price of a source that only
    the source itself can seek: every rank reads and decodes the whole stream, ``n`` times the work of
    :class:`DatasetLoader`; all items of one global batch are kept, so that a step can come again; and each switch makes
    the source start anew from its state, with what it had read ahead thrown away. Where an epoch ends inside a
    batch, the batch goes on with the next epoch.

    Args:
        source: gives single items (``StatefulDataLoader(..., batch_size=None)``), the same on all ranks: neither cut
            by rank nor shuffled by a seed of the rank. Let it shuffle by a sampler with a generator of its own
            (torchdata's ``RandomSampler``): with ``shuffle=True, generator=...`` torchdata 0.11 draws from it at each
            start too, and the epoch after a switch has another order.
        global_batch: items of one step; a multiple of the data ranks of every layout.
        collate: makes a batch of a list of items.

    Raises:
        LoaderError: ``source`` lacks one of the three methods.
    """

    def __init__(
        self, source: Source, *, global_batch: int, collate: Callable[[list[Any]], Any] = default_collate
    ) -> None:
        super().__init__(global_batch)
        if missing := [name for name in ("__iter__", "state_dict", "load_state_dict") if not hasattr(source, name)]:
            raise LoaderError(
                f"{type(source).__name__} has no {', '.join(missing)}; a source says where it stands, as torchdata's "
                "StatefulDataLoader does; a map-style dataset goes to DatasetLoader"
            )
        self._source: Source = source
        self._collate = collate
        self._items: Iterator[Any] | None = None
        self._held: tuple[int, list[Any]] = (-1, [])

    def next(self, switcher: Switcher) -> Any:
        """This rank's share of the global batch of ``switcher.step``, collated. All ranks call it, once a step.

        Raises:
            LoaderError: the source has no items.
        """
        first, (rank, ways) = self._first(switcher.step), self._share(switcher.layout)
        if self._held[0] != first:
            self._held = first, self._take()
        return self._collate(self._held[1][rank::ways])

    def state_dict(self) -> dict[str, Any]:
        """The cursor, with the source's own state."""
        return {**super().state_dict(), "source": self._source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the items that ``state`` has taken."""
        if self._is_here(state):
            return
        super().load_state_dict(state)
        self._source.load_state_dict(state["source"])
        self._items, self._held = None, (-1, [])

    def _take(self) -> list[Any]:
        """The next global batch's items, over the ends of epochs."""
        taken: list[Any] = []
        passes = 0
        while len(taken) < self.global_batch:
            if self._items is None:
                self._items, passes = iter(self._source), passes + 1
            before = len(taken)
            taken += islice(self._items, self.global_batch - before)
            if len(taken) < self.global_batch:
                self._items = None
                # One pass may be empty: a state may lie at an epoch's very end.
                if len(taken) == before and passes > 1:
                    raise LoaderError(f"{type(self._source).__name__} gave no item in a whole pass over it")
        return taken
