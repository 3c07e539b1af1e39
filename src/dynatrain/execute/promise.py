"""One bound on memory for several jobs of a process: an actor, a critic, a reference.

Each job counts its own state (:class:`~dynatrain.execute.pieces.Pool`) and tells the promise before it takes more. Two
switches at once would each need room for what the other is about to give up: so the jobs of a process switch one after
the other, and all the room that is left is for the one that has the turn.
"""

import threading


class PromiseError(RuntimeError):
    """More was asked for than all jobs together may hold; nothing was taken."""


class Promise:
    """The most bytes of state that the jobs of one process hold together, on its device, at any time.

    Shared by threads. What is counted are pieces and staging buffers, as in a switch's certificate; not what a step
    needs (activations, gradients, gathered parameters), nor what a job has beside its state.

    Args:
        limit: bytes; of this process alone, equal on all ranks or not.

    Attributes:
        limit: likewise.
        held: bytes now held by all jobs.
        peak: most bytes ever held at once; a caller may set it back to ``held``.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a promise of {limit} bytes: at least 1, what all jobs hold and the largest switch needs")
        self.limit = limit
        self.held = 0
        self.peak = 0
        self._lock = threading.Lock()
        self._turn: object | None = None

    @property
    def room(self) -> int:
        """Bytes that may still be taken."""
        return self.limit - self.held

    def take(self, nbytes: int) -> None:
        """Count bytes that are about to be allocated.

        Raises:
            PromiseError: that would be too many; they are not counted.
        """
        with self._lock:
            if nbytes > self.room:
                raise PromiseError(
                    f"{nbytes} bytes more were asked for; the jobs of this process hold {self.held} of the "
                    f"{self.limit} that were promised as the most: {self.room} are left"
                )
            self.held += nbytes
            self.peak = max(self.peak, self.held)

    def give_back(self, nbytes: int) -> None:
        """Count bytes that were freed."""
        with self._lock:
            self.held -= nbytes

    def take_turn(self, who: object) -> bool:
        """Whether ``who`` may switch now; then nobody else may until :meth:`end_turn`. Again is the same."""
        with self._lock:
            if self._turn is None:
                self._turn = who
            return self._turn is who

    def end_turn(self, who: object) -> None:
        """The switch of ``who`` has ended; nothing where it is not its turn."""
        with self._lock:
            if self._turn is who:
                self._turn = None
