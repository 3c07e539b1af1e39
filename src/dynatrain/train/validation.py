"""Validation: the loss on held-out samples, forward only, the same number in every layout.

Which samples, and in which order, is a function of the seed alone: the first ones of ``data.order``'s order over the
held-out samples, each once, the same at every validation. A micro-batch's loss is summed over its tokens in fp64, lies
in a slot of its own, and reaches all ranks in one all-reduce in which every slot has one summand; the slots' sum is
rounded once. So layouts differ only in the rounding inside one forward: not at all among dp and fsdp, in the last bits
of the compute precision where tp splits a product.

It runs after a step's optimizer step, when no switch is between its move and its commit, in eval mode and without
gradients, and leaves the modules as a step finds them: training has the same bits with it and without it.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import DeviceMesh

from dynatrain.data.order import batch_ids
from dynatrain.layout.layout import Layout
from dynatrain.models.decoder import DecoderPart
from dynatrain.train.pipeline import Pipeline
from dynatrain.train.step import IGNORED, Data, MicroBatch, Sharing, together, told


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """What is validated, and when.

    Attributes:
        data: the held-out samples.
        every: steps between two validations.
        batches: global batches of one validation; fewer where there are not so many samples.
    """

    data: Data
    every: int
    batches: int

    def due(self, step: int) -> bool:
        """Whether to validate after step ``step``."""
        return (step + 1) % self.every == 0

    def ids(self, seed: int, global_sequences: int) -> np.ndarray:
        """The samples, in order, each once; int64."""
        return batch_ids(seed, 0, min(self.batches * global_sequences, len(self.data)), len(self.data))


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationResult:
    """One validation in numbers, equal on all ranks whatever the layout.

    Attributes:
        step: after which it ran.
        loss: mean over the targets of all its samples.
        samples: how many there were.
        tokens: their targets.
        seconds: wall time on this rank.
    """

    step: int
    loss: float
    samples: int
    tokens: int
    seconds: float


class Validator:
    """Validates one world's model.

    Args:
        validation: on what.
        seed: of the run.
        parts: this rank's parts of the model.
        layout: its layout.
        mesh: its mesh.
        sharing: how a global batch is cut into micro-batches.
    """

    def __init__(
        self,
        validation: Validation,
        seed: int,
        parts: Sequence[DecoderPart],
        layout: Layout,
        mesh: DeviceMesh,
        sharing: Sharing,
    ) -> None:
        self._data = validation.data
        self._ids = validation.ids(seed, sharing.global_sequences)
        self._sharing = sharing
        self._parts = parts
        self._layout = layout
        self._device = mesh.device_type
        self._at = layout.coordinates(dist.get_rank())
        self._pipeline = None
        if layout.size("pp") > 1:
            # Stages of its own: those that train would prepare their buffers anew at each change of mode.
            share = -(-sharing.num_micro_batches // layout.data_ranks)
            self._pipeline = Pipeline(parts, layout, mesh, micro_batches=share, loss=_total, schedule="gpipe")

    def run(self, step: int) -> ValidationResult:
        """Validate after ``step``. All ranks call it."""
        began = time.perf_counter()
        size, per_batch = self._sharing.global_sequences, self._sharing.num_micro_batches
        slots = torch.zeros(-(-len(self._ids) // size), per_batch, dtype=torch.float64)
        tokens = 0
        for part in self._parts:
            part.eval()
        with torch.no_grad():
            for number, row in enumerate(slots):
                ids = self._ids[number * size : (number + 1) * size]
                batches, targets = self._sharing.micro_batches(self._data, ids, self._layout, self._at, self._device)
                self._fill(row, batches)
                tokens += targets
        for part in self._parts:
            part.train()
            # Drops gathered parameters, and the order of forwards by which the next backward would prefetch.
            part.reset_iter_state()
        if self._at.tp != 0:
            slots.zero_()  # tp ranks share the micro-batches of their data rank: one of them tells
        dist.all_reduce(slots)
        return ValidationResult(
            step=step,
            loss=math.fsum(slots.flatten().tolist()) / tokens,
            samples=len(self._ids),
            tokens=tokens,
            seconds=time.perf_counter() - began,
        )

    def _fill(self, row: torch.Tensor, batches: Sequence[MicroBatch]) -> None:
        """Write this rank's micro-batches' losses into their places of ``row`` fp64 [micro-batches]."""
        for batch, loss in zip(batches, self._losses(batches), strict=False):  # none but on the last stage
            if batch.index >= 0:
                row[batch.index] = loss

    def _losses(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        if self._pipeline is not None:
            return self._pipeline.run(*together(batches), backward=False)
        (part,) = self._parts
        return [_total(part(batch.inputs, **told([batch])), batch.targets) for batch in batches]


def _total(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of the losses of all tokens, fp64."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    each = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return each.double().sum()
