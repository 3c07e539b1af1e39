"""Copies of state on the host, taken beside training and bounded in memory."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from dynatrain.cluster.kernel import step_aside
from dynatrain.train.agreement import SwitchAbortedError, words_of


class Snapshot:
    """Copies tensors in a thread, in the order in which they will be taken.

    The tensors must not be written before :meth:`wait_copied` has returned: between two optimizer steps nothing writes
    parameters and moments, so the copies are made beside a forward and backward; ``check`` sees what a loop writes all
    the same. The thread only has what processor
    time training leaves over; what it has not copied when training must wait, the training thread copies itself.

    Args:
        tensors: by key.
        budget: bytes of copies that may wait to be taken; one copy larger than it may wait alone. 0 for no bound.
        looks: called behind the copies, each once: what only reads tensors that are not to be written yet.
        copy: makes the copy of a tensor, by its key, on the host.
        check: called with its key before and behind each copy and look; raises where it would be of no one moment, and
            with it all the others.

    Attributes:
        over: why no more is copied; empty as long as it is.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        budget: int,
        looks: Mapping[str, Callable[[], None]] | None = None,
        *,
        copy: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor.to("cpu", copy=True),
        check: Callable[[str], None] = lambda _key: None,
    ) -> None:
        self._tensors = dict(tensors)
        self._looks = {key: partial(self._look, key, look) for key, look in (looks or {}).items()}
        self._budget = budget
        self._make = copy
        self._check = check
        self._changed = threading.Condition()
        self._copies: dict[str, torch.Tensor] = {}
        self._held = 0
        self._under_way = 0
        self.over = ""
        self._thread = threading.Thread(target=self._run, name="snapshot", daemon=True)

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def wait_copied(self, seconds: float) -> bool:
        """Return when all is copied, or the snapshot was given up, at most that much later; whether it is."""
        deadline = time.monotonic() + seconds
        self._work(deadline)
        with self._changed:
            self._changed.wait_for(self._settled, max(0.0, deadline - time.monotonic()))
            return self._settled()

    def wait_looked(self) -> None:
        """Return when every look has been had.

        Raises:
            SwitchAbortedError: the snapshot was given up, or one of them failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.over or self._settled())
            if self.over:
                raise SwitchAbortedError(self.over)

    def take(self, key: str) -> torch.Tensor:
        """The copy of one tensor, once; waits for it.

        Raises:
            SwitchAbortedError: it was given up, or could not be made.
        """
        with self._changed:
            self._changed.wait_for(lambda: key in self._copies or self.over)
            if key not in self._copies:
                raise SwitchAbortedError(self.over)
            copy = self._copies.pop(key)
            self._held -= copy.nbytes
            self._changed.notify_all()
        return copy

    def give_up(self, why: str) -> None:
        """Copy no more, and have whoever waits for a copy raise."""
        with self._changed:
            self.over = self.over or why
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        step_aside()
        self._work(math.inf)

    def _work(self, deadline: float) -> None:
        """Copy until nothing is left to be copied; one thread or two."""
        while (work := self._next(deadline)) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - told to whoever takes
                self.over = self.over or words_of(error)
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _next(self, deadline: float) -> Callable[[], None] | None:
        """The next work. A copy is counted now, in their order: so no copy can wait for a later one's room."""
        wait = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
        with self._changed:
            self._changed.wait_for(lambda: self.over or not self._tensors or self._fits(), wait)
            if self.over or not (self._tensors or self._looks) or not self._fits():
                return None
            self._under_way += 1
            if not self._tensors:
                return self._looks.pop(next(iter(self._looks)))
            key = next(iter(self._tensors))
            self._held += self._tensors[key].nbytes
            return partial(self._copy, key, self._tensors.pop(key))

    def _copy(self, key: str, tensor: torch.Tensor) -> None:
        self._check(key)
        copy = self._make(key, tensor.detach())
        self._check(key)
        with self._changed:
            self._copies[key] = copy

    def _look(self, key: str, look: Callable[[], None]) -> None:
        self._check(key)
        look()
        self._check(key)

    def _settled(self) -> bool:
        return bool(self.over) or not (self._tensors or self._looks or self._under_way)

    def _fits(self) -> bool:
        """Whether the next copy, if there is one, has room."""
        if not self._tensors:
            return True
        nbytes = next(iter(self._tensors.values())).nbytes
        return not self._budget or not self._held or self._held + nbytes <= self._budget
