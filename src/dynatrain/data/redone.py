"""What is trained on again after a run has gone back: whole steps, and with them exactly their samples."""

from dataclasses import dataclass

import numpy as np

from dynatrain.data.order import Ids, batch_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Redone:
    """The steps ``first`` .. ``end`` - 1: those that were trained, and whose outcome is gone.

    A batch is a function of (seed, step), so a step that is done again sees the samples that it saw before, in the same
    order, in whatever layout.

    Attributes:
        first: the step that the state goes on from: so many steps are trained.
        end: so many had been trained before the loss; equal to ``first`` where nothing is done again.
        global_sequences: samples of one step.
    """

    first: int
    end: int
    global_sequences: int

    @property
    def steps(self) -> int:
        """How many steps."""
        return self.end - self.first

    @property
    def samples(self) -> int:
        """How many samples, each as often as steps see it."""
        return self.steps * self.global_sequences

    def ids(self, seed: int, num_samples: int) -> Ids:
        """The samples, in order, int64 [samples]; arguments as in :func:`~dynatrain.data.order.batch_ids`."""
        batches = (batch_ids(seed, step, self.global_sequences, num_samples) for step in range(self.first, self.end))
        return np.concatenate([np.zeros(0, np.int64), *batches])

    def __str__(self) -> str:
        if not self.steps:
            return "no step is done again"
        first = self.first * self.global_sequences
        which = f"step {self.first}" if self.steps == 1 else f"steps {self.first} to {self.end - 1}"
        are = "is" if self.steps == 1 else "are"
        return (
            f"{which} {are} done again: the {self.samples} samples at places {first} to {first + self.samples - 1} of "
            "the order"
        )
