"""Copies of state on the host, taken beside training and bounded in memory."""

import threading
from collections.abc import Mapping

import torch


class Snapshot:
    """Copies tensors in a thread, in the order in which they will be taken.

    The tensors must not be written before :meth:`wait_copied` has returned: between two optimizer steps nothing writes
    parameters and moments, so the copies are made beside a forward and backward.

    Args:
        tensors: by key.
        budget: bytes of copies that may wait to be taken; one copy larger than it may wait alone. 0 for no bound.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], budget: int) -> None:
        self._tensors = dict(tensors)
        self._budget = budget
        self._changed = threading.Condition()
        self._copies: dict[str, torch.Tensor] = {}
        self._held = 0
        self._over = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="snapshot", daemon=True)

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def wait_copied(self, seconds: float) -> bool:
        """Wait until all is copied, or the snapshot was given up, at most that long; whether it is."""
        return self._ended.wait(seconds)

    def take(self, key: str) -> torch.Tensor:
        """The copy of one tensor, once; waits for it.

        Raises:
            RuntimeError: it was given up, or could not be made.
        """
        with self._changed:
            self._changed.wait_for(lambda: key in self._copies or self._over)
            if key not in self._copies:
                raise RuntimeError(self._over)
            copy = self._copies.pop(key)
            self._held -= copy.nbytes
            self._changed.notify_all()
        return copy

    def give_up(self, why: str) -> None:
        """Copy no more, and have whoever waits for a copy raise."""
        with self._changed:
            self._over = self._over or why
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            for key in list(self._tensors):
                if not self._copy(key):
                    break
        except Exception as error:  # noqa: BLE001 - told to whoever takes
            with self._changed:
                self._over = f"{type(error).__name__}: {error}"
                self._changed.notify_all()
        finally:
            self._ended.set()

    def _copy(self, key: str) -> bool:
        tensor = self._tensors.pop(key)
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._fits(tensor.nbytes))
            if self._over:
                return False
            self._held += tensor.nbytes
        copy = tensor.detach().to("cpu", copy=True)
        with self._changed:
            self._copies[key] = copy
            self._changed.notify_all()
        return True

    def _fits(self, nbytes: int) -> bool:
        return not self._budget or not self._held or self._held + nbytes <= self._budget
